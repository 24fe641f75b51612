// Files and vector stores, on a server that has them.

import { call, json } from "./api.js";
import { bytes, button, field, fill, h, icon } from "./dom.js";
import { clean } from "./markdown.js";

const POLL_MS = 1500;

export function filesView(panel, { tell }) {
  const files = h("tbody", {}), stores = h("tbody", {}), said = h("p", { class: "said", role: "status" });
  const chooser = h("input", { type: "file", multiple: true, hidden: true, "aria-label": "Files to upload" });
  const name = h("input", { required: true, maxlength: "200" });
  const create = h("form", { class: "row-form" }, field("Name of a new store", name), h("span", { class: "dim" }, "It gets the files that are ticked."), h("button", { class: "primary" }, "Create"));
  const storesCard = h("section", { class: "card", hidden: true }, h("h2", {}, "Vector stores"), h("table", { class: "models-table" },
    h("thead", {}, h("tr", {}, ["Name", "Files", "Status", ""].map((title) => h("th", {}, title)))), stores), create);
  const ticked = new Set();
  let timer;
  fill(panel, h("div", { class: "narrow stack" }, h("section", { class: "card" },
    h("h2", {}, "Files", h("button", { type: "button", onclick: () => chooser.click() }, icon("upload"), "Upload")), chooser, said,
    h("table", { class: "models-table" }, h("thead", {}, h("tr", {}, ["", "Name", "Size", "Purpose", ""].map((title) => h("th", {}, title)))), files)), storesCard));

  chooser.addEventListener("change", async () => {
    for (const file of chooser.files) {
      said.textContent = `Uploading ${file.name} …`;
      const form = new FormData();
      form.append("purpose", "assistants");
      form.append("file", file);
      try { await call("v1/files", { form }); said.textContent = ""; } catch (error) { said.textContent = `${file.name}: ${error.message}`; }
    }
    chooser.value = "";
    refresh();
  });
  create.addEventListener("submit", async (event) => {
    event.preventDefault();
    try {
      await call("v1/vector_stores", { body: { name: name.value, file_ids: [...ticked] } });
      create.reset();
      ticked.clear();
    } catch (error) { tell(error.message); }
    refresh();
  });

  const remove = (path) => async () => {
    try { await call(path, { method: "DELETE" }); } catch (error) { tell(error.message); }
    refresh();
  };

  function fileRow(file) {
    const tick = h("input", { type: "checkbox", "aria-label": `Choose ${clean(file.filename)}` });
    tick.checked = ticked.has(file.id);
    tick.addEventListener("change", () => (tick.checked ? ticked.add(file.id) : ticked.delete(file.id)));
    return h("tr", {}, h("td", {}, tick), h("td", {}, clean(file.filename)), h("td", {}, bytes(file.bytes)), h("td", { class: "dim" }, clean(file.purpose)),
      h("td", {}, button("Delete", "trash", remove(`v1/files/${encodeURIComponent(file.id)}`))));
  }

  function storeRow(store) {
    const { completed = 0, total = 0, failed = 0 } = store.file_counts ?? {};
    const why = h("div", { class: "failed" });
    if (failed) tellFailed(store.id, why);
    return h("tr", {}, h("td", {}, clean(store.name ?? store.id)), h("td", {}, `${completed} of ${total}${failed ? `, ${failed} failed` : ""}`, why), h("td", { class: "dim" }, clean(store.status ?? "")),
      h("td", {}, button("Delete", "trash", remove(`v1/vector_stores/${encodeURIComponent(store.id)}`))));
  }

  async function tellFailed(id, node) {
    try {
      const { data } = await json(`v1/vector_stores/${encodeURIComponent(id)}/files?filter=failed&limit=3`);
      fill(node, data.map((file) => h("div", {}, clean(file.last_error?.message ?? file.id))));
    } catch { /* the count is shown */ }
  }

  async function refresh() {
    clearTimeout(timer);
    try {
      const listed = (await json("v1/files")).data;
      fill(files, listed.length ? listed.map(fileRow) : h("tr", {}, h("td", { colspan: "5", class: "empty" }, "No files yet.")));
    } catch (error) { tell(error.message); }
    try {
      const listed = (await json("v1/vector_stores")).data;
      storesCard.hidden = false;
      fill(stores, listed.length ? listed.map(storeRow) : h("tr", {}, h("td", { colspan: "4", class: "empty" }, "No stores yet.")));
      if (listed.some((store) => store.status === "in_progress")) timer = setTimeout(refresh, POLL_MS);
    } catch { storesCard.hidden = true; }
  }

  return { show: refresh, hide: () => clearTimeout(timer) };
}
