// Training: fine-tuning jobs, their state and their loss as it comes.

import { call, events, json } from "./api.js";
import { button, canvas, fill, h, number } from "./dom.js";
import { clean } from "./markdown.js";
import { drawPlot } from "./steps.js";

const POLL_MS = 2000, WHERE = "v1/fine_tuning/jobs";
const ACTIONS = { queued: ["pause", "cancel"], running: ["pause", "cancel"], paused: ["resume", "cancel"], validating_files: ["cancel"] };
const ICONS = { pause: "pause", resume: "play", cancel: "stop" };
const LINES = [["train", "training", "plot"], ["valid", "validation", "plot2"]];

export function trainingView(panel, { tell }) {
  const list = h("tbody", {}), title = h("span", {}), last = h("p", { class: "dim" }), log = h("pre", { class: "report" });
  let points = [], chosen = null, stream = null, timer = null;
  const plot = canvas("Loss by step", (node, context) => drawPlot(node, context, points, LINES, { unit: "step" }));
  const curve = h("section", { class: "card plot", hidden: true }, h("h2", {}, "Loss", title), plot, last, h("details", {}, h("summary", {}, "Messages"), log));
  fill(panel, h("div", { class: "narrow stack" }, h("section", { class: "card" }, h("h2", {}, "Fine-tuning jobs"), h("div", { class: "scroll" }, h("table", { class: "models-table" },
    h("thead", {}, h("tr", {}, ["Job", "Model", "State", ""].map((name) => h("th", {}, name)))), list))), curve));

  const act = (id, action) => async () => {
    try { await call(`${WHERE}/${encodeURIComponent(id)}/${action}`, { method: "POST" }); } catch (error) { tell(error.message); }
    refresh();
  };

  function row(job) {
    const left = job.estimated_finish ? `, about ${number(Math.max(0, job.estimated_finish - Date.now() / 1000))} s left` : "";
    return h("tr", { class: job.id === chosen ? "chosen" : null }, h("td", {}, h("button", { type: "button", class: "plain", onclick: () => choose(job.id) }, clean(job.fine_tuned_model ?? job.user_provided_suffix ?? job.id))),
      h("td", {}, clean(job.model)), h("td", { class: job.error ? "failed" : "dim" }, `${clean(job.status)}${left}`, job.error && `: ${clean(job.error.message)}`),
      h("td", { class: "actions" }, (ACTIONS[job.status] ?? []).map((action) => button(action, ICONS[action], act(job.id, action)))));
  }

  async function refresh() {
    clearTimeout(timer);
    const { data } = await json(`${WHERE}?limit=100`);
    fill(list, data.length ? data.map(row) : h("tr", {}, h("td", { colspan: "4", class: "empty" }, "No jobs yet. Start one with POST /v1/fine_tuning/jobs; the server needs --enable-lora.")));
    if (!chosen && data.length) choose(data[0].id);
    if (data.some((job) => ACTIONS[job.status])) timer = setTimeout(() => refresh().catch((error) => tell(error.message)), POLL_MS);
  }

  async function choose(id) {
    stream?.abort();
    stream = new AbortController();
    const { signal } = stream;
    chosen = id;
    points = [];
    curve.hidden = false;
    fill(log);
    refresh();
    try {
      for await (const event of events(await call(`${WHERE}/${encodeURIComponent(id)}/events?stream=true`, { signal }))) {
        if (event.data?.train_loss === undefined) log.append(`${clean(event.message)}\n`);
        else {
          points.push({ time: event.data.step, train: event.data.train_loss, valid: event.data.full_valid_loss });
          last.textContent = clean(event.message);
        }
        fill(title, LINES.map(([name, label, tone], index) => [index ? " · " : "", h("span", { style: { color: `var(--${tone})` } }, label),
          ` ${points.findLast((point) => point[name] !== undefined)?.[name].toFixed(3) ?? "–"}`]));
        plot.redraw();
      }
    } catch (error) { if (error.name !== "AbortError") tell(error.message); }
    if (!signal.aborted) refresh();
  }

  return {
    show: () => (chosen ? choose(chosen) : refresh()).catch((error) => tell(error.message)),
    hide: () => { clearTimeout(timer); stream?.abort(); },
  };
}
