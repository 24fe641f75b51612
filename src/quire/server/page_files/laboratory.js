// Laboratory: the reports that `quire bench lab` wrote beside this server.

import { call, json } from "./api.js";
import { fill, h } from "./dom.js";
import { clean } from "./markdown.js";

export function laboratoryView(panel, { tell }) {
  const list = h("tbody", {}), shown = h("div", { class: "stack" }), how = h("p", { class: "dim" });
  let chosen = null;
  fill(panel, h("div", { class: "narrow stack" }, h("section", { class: "card" }, h("h2", {}, "Reports"), h("div", { class: "scroll" },
    h("table", { class: "models-table" }, h("thead", {}, h("tr", {}, ["Experiment", "Found", "Date"].map((title) => h("th", {}, title)))), list)), how), shown));

  async function refresh() {
    const { data, folder, command } = await json("v1/laboratory");
    fill(how, data.length ? "Another one: " : `No report in ${folder}, in the folder where this server was started. To make one: `,
      h("code", {}, command), "; ", h("code", {}, "quire bench lab list"), " names the experiments.");
    fill(list, data.map((report) => h("tr", { class: report.file === chosen ? "chosen" : null },
      h("td", {}, h("button", { type: "button", class: "plain", onclick: () => open(report.file) }, clean(report.name))),
      h("td", {}, clean(report.take_away)), h("td", { class: "dim" }, clean(String(report.date).slice(0, 10))))));
  }

  async function open(file) {
    try {
      const record = await json(`v1/laboratory/${encodeURIComponent(file)}`), { results } = record;
      chosen = file;
      fill(shown, h("section", { class: "card" }, h("h2", {}, clean(record.benchmark), h("span", {}, clean(record.machine?.cpu ?? ""))),
        h("p", {}, clean(results.take_away)), await Promise.all((results.pictures ?? []).map(picture)),
        h("ul", { class: "found" }, (results.checks ?? []).map((check) => h("li", { class: check.held === false ? "failed" : null },
          `${check.held === false ? "not held" : check.held ? "held" : "not measured"}: ${clean(check.claim)} (${clean(check.measured)})`))),
        (results.tables ?? []).map((table) => h("div", { class: "scroll" }, h("h3", {}, clean(table.title)), h("table", {},
          h("thead", {}, h("tr", {}, table.head.map((title) => h("th", {}, clean(title))))),
          h("tbody", {}, table.rows.map((row) => h("tr", {}, row.map((cell) => h("td", {}, clean(String(cell)))))))))),
        (results.notes ?? []).map((note) => h("p", { class: "dim" }, clean(note)))));
      refresh();
      shown.scrollIntoView({ block: "start" });
    } catch (error) { tell(error.message); }
  }

  // Drawn on a canvas: the page's policy allows no images of data that a key was sent for.
  async function picture(name) {
    const node = h("canvas", { class: "picture", role: "img", "aria-label": clean(name) });
    try {
      const image = await createImageBitmap(await (await call(`v1/laboratory/${encodeURIComponent(name)}`)).blob());
      Object.assign(node, { width: image.width, height: image.height });
      node.getContext("2d").drawImage(image, 0, 0);
      return node;
    } catch { return h("p", { class: "dim" }, `The picture ${clean(name)} is not there.`); }
  }

  return { show: () => refresh().catch((error) => tell(error.message)) };
}
