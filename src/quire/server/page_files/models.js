// Models and adapters: what this server has, and loading and unloading adapters.

import { call, json } from "./api.js";
import { bytes, field, fill, h, number } from "./dom.js";
import { clean } from "./markdown.js";

export function modelsView(panel, { tell }) {
  const list = h("tbody", {}), facts = h("div", { class: "tiles" }), report = h("pre", { class: "report" });
  const said = h("p", { class: "said", role: "alert" });
  const name = h("input", { required: true, maxlength: "200" }), path = h("input", { required: true, maxlength: "4096" });
  const load = h("form", { class: "row-form" }, field("Name", name), field("Folder, inside --lora-dir", path), h("button", { class: "primary" }, "Load"));
  const loadCard = h("section", { class: "card", hidden: true }, h("h2", {}, "Load a LoRA adapter"), load, said);
  const reportCard = h("section", { class: "card", hidden: true }, h("h2", {}, "Start report"), report);
  fill(panel, h("div", { class: "narrow stack" }, facts,
    h("section", { class: "card" }, h("h2", {}, "Models and adapters"), h("table", { class: "models-table" },
      h("thead", {}, h("tr", {}, ["Name", "Kind", "Context", ""].map((title) => h("th", {}, title)))), list)), loadCard, reportCard));

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

  async function refresh() {
    const { data } = await json("v1/models");
    fill(list, data.map((model) => h("tr", {}, h("td", {}, clean(model.id)),
      h("td", { class: "dim" }, model.parent ? `adapter of ${clean(model.parent)}` : "model"), h("td", {}, model.max_model_len ? number(model.max_model_len) : "starts when asked"),
      h("td", {}, model.parent && h("button", { type: "button", onclick: () => unload(model.id) }, "Unload")))));
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

  return { show: () => refresh().catch((error) => tell(error.message)) };
}
