// Models and adapters: what this server has, and loading and unloading adapters.

import { call, json } from "./api.js";
import { bytes, field, fill, h, number } from "./dom.js";
import { clean } from "./markdown.js";

export function modelsView(panel, { tell }) {
  const list = h("tbody", {}), facts = h("div", { class: "tiles" }), report = h("pre", { class: "report" });
  const said = h("p", { class: "said", role: "alert" });
  let timer = null;
  const name = h("input", { required: true, maxlength: "200" }), path = h("input", { required: true, maxlength: "4096" });
  const load = h("form", { class: "row-form" }, field("Name", name), field("Folder, inside --lora-dir", path), h("button", { class: "primary" }, "Load"));
  const loadCard = h("section", { class: "card", hidden: true }, h("h2", {}, "Load a LoRA adapter"), load, said);
  const reportCard = h("section", { class: "card", hidden: true }, h("h2", {}, "Start report"), report);
  fill(panel, h("div", { class: "narrow stack" }, facts,
    h("section", { class: "card" }, h("h2", {}, "Models and adapters"), h("table", { class: "models-table" },
      h("thead", {}, h("tr", {}, ["Name", "Kind", "Context or state", ""].map((title) => h("th", {}, title)))), list)), loadCard, reportCard));

  load.addEventListener("submit", async (event) => {
    event.preventDefault();
    said.textContent = "Loading …";
    try {
      await call("v1/load_lora_adapter", { body: { lora_name: name.value, lora_path: path.value }, admin: true });
      said.textContent = "";
      load.reset();
      refresh();
    } catch (error) { said.textContent = error.message; }
  });

  async function unload(id) {
    try {
      await call("v1/unload_lora_adapter", { body: { lora_name: id }, admin: true });
    } catch (error) { tell(error.message); }
    refresh();
  }

  // One of several models behind this port.
  async function change(id, action) {
    setTimeout(refresh, 300); // its state while it starts
    try {
      await call(`v1/models/${action}`, { body: { model: id }, admin: true });
    } catch (error) { tell(error.message); }
    refresh();
  }

  function state(model) {
    if (model.max_model_len) return number(model.max_model_len);
    if (model.error) return h("span", { class: "failed" }, clean(model.error));
    return clean([model.state ?? "starts when asked", model.pinned && "pinned", model.memory_bytes && bytes(model.memory_bytes), model.progress].filter(Boolean).join(", "));
  }

  function action(model) {
    if (model.parent) return h("button", { type: "button", onclick: () => unload(model.id) }, "Unload");
    if (!model.state || model.pinned || model.state === "starting") return null;
    const does = model.state === "ready" ? "unload" : "load";
    return h("button", { type: "button", onclick: () => change(model.id, does) }, does === "load" ? "Load" : "Unload");
  }

  async function refresh() {
    clearTimeout(timer);
    const { data } = await json("v1/models");
    fill(list, data.map((model) => h("tr", {}, h("td", {}, clean(model.id)),
      h("td", { class: "dim" }, model.parent ? `adapter of ${clean(model.parent)}` : model.task === "embed" ? "encoder" : "model"), h("td", {}, state(model)), h("td", {}, action(model)))));
    if (data.some((model) => model.state === "starting")) timer = setTimeout(refresh, 1000);
    if (data.some((model) => model.state) && !data.some((model) => model.state === "ready")) return; // to ask for facts would start one
    try {
      const engine = await json("v1/engine", { admin: true });
      const tile = (value, label) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, label));
      fill(facts, tile(bytes(engine.weights_bytes), "weights"), engine.pool && tile(bytes(engine.pool.num_bytes), "KV pool"),
        tile(number(engine.max_model_len), "tokens of context"), tile(number(engine.max_num_seqs), "sequences at once"), tile(engine.version, "version"));
      report.textContent = clean(engine.report.join("\n"));
      reportCard.hidden = false;
      loadCard.hidden = !engine.lora.enabled;
    } catch { fill(facts); }
  }

  return { show: () => refresh().catch((error) => tell(error.message)), hide: () => clearTimeout(timer) };
}
