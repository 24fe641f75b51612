// Steps: what the engine's last passes computed, and rates and latencies over time.

import { call } from "./api.js";
import { button, canvas, colour, fill, h, icon, number } from "./dom.js";
import { feed } from "./feed.js";
import { engines, locked } from "./memory.js";

const SHOWN = 120, METRICS_MS = 2000, WINDOW = 90; // seconds of the plots
const HISTOGRAMS = { quire_time_to_first_token_seconds: "ttft", quire_inter_token_latency_seconds: "itl", quire_request_queue_time_seconds: "queue" };

export function stepsView(panel) {
  return new StepsView(panel);
}

class StepsView {
  constructor(panel) {
    this.panel = panel;
    this.box = h("div", {});
    panel.append(this.box);
    this.frozen = null;
    this.latencies = []; // {time, ttft: [p50, p95], …}
    this.build();
    feed.onrecord(() => this.changed());
  }

  show() {
    this.isShown = true;
    feed.open();
    engines.show(this.panel);
    this.timer = setInterval(() => this.readMetrics(), METRICS_MS);
    this.readMetrics();
    this.changed();
  }

  hide() {
    this.isShown = false;
    clearInterval(this.timer);
    engines.hide();
    feed.close();
  }

  build() {
    this.tiles = h("div", { class: "tiles" });
    this.strip = canvas("The last steps: height is time, colour what was computed", (node, context) => this.drawStrip(node, context));
    this.tip = h("div", { class: "tip", hidden: true });
    this.freeze = button("Freeze", "pause", () => this.toggle());
    this.stripTitle = h("span", {});
    const swatch = (name, label) => h("span", {}, h("i", { style: { background: `var(--${name})` } }), label);
    this.plots = [
      this.plot("Tokens per second", [["computed", "computed", "plot2"], ["tokens", "generated", "plot"]], () => feed.mirror.points),
      this.plot("Sequences", [["running", "running", "plot"], ["waiting", "waiting", "plot2"]], () => feed.mirror.points),
      this.plot("Time of a step (ms)", [["step_ms", "longest", "plot"]], () => feed.mirror.points.filter((point) => point.step_ms)),
      this.plot("Pool in use (%)", [["used_percent", "used", "plot"]], () => feed.mirror.points.map((point) => ({ ...point, used_percent: 100 * (point.used ?? 0) })), 100),
      this.plot("Time to first token (ms)", [["ttft50", "median", "plot"], ["ttft95", "95 %", "plot2"]], () => this.latencies.filter((point) => point.ttft50 !== undefined)),
      this.plot("Time between tokens (ms)", [["itl50", "median", "plot"], ["itl95", "95 %", "plot2"]], () => this.latencies.filter((point) => point.itl50 !== undefined)),
    ];
    this.content = h("div", {}, this.tiles,
      h("section", { class: "card strip" }, h("h2", {}, "Steps", h("span", {}, this.stripTitle, " ", this.freeze)), h("div", { class: "map-box" }, this.strip, this.tip),
        h("div", { class: "legend" }, swatch("prefill", "prefill rows"), swatch("decode", "decode rows"), swatch("verify", "verify rows"), h("span", {}, "height: time of the step"))),
      h("div", { class: "plots", style: { marginTop: ".9rem" } }, this.plots.map((plot) => plot.card)));
    this.strip.addEventListener("mousemove", (event) => this.hover(event));
    this.strip.addEventListener("mouseleave", () => { this.tip.hidden = true; });
    this.strip.addEventListener("click", () => this.toggle());
  }

  toggle() {
    this.frozen = this.frozen ? null : feed.mirror.steps.slice(-SHOWN);
    fill(this.freeze, icon(this.frozen ? "play" : "pause"));
    this.freeze.title = this.frozen ? "Go on" : "Freeze";
    this.freeze.setAttribute("aria-label", this.freeze.title);
    this.strip.redraw();
  }

  changed() {
    if (!this.isShown) return;
    const lock = locked(feed.error, () => feed.retry());
    if (lock || this.lock) {
      this.lock = lock;
      fill(this.box, lock ?? this.content);
      if (lock) return;
    } else if (!this.content.isConnected) fill(this.box, this.content);
    this.strip.redraw();
    const now = performance.now();
    if (now - (this.updated ?? 0) < 240) {
      this.late ??= setTimeout(() => { this.late = null; this.changed(); }, 250);
      return;
    }
    this.updated = now;
    this.updateTiles();
    for (const plot of this.plots) plot.node.redraw();
  }

  updateTiles() {
    const { counters, queue, points } = feed.mirror, tile = (value, label) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, label));
    const last = this.latencies.at(-1) ?? {}, ms = (value) => (value === undefined ? "–" : `${number(value)} ms`);
    const accepted = counters.draft_tokens ? `${Math.round(100 * counters.accepted_tokens / counters.draft_tokens)} %` : null;
    fill(this.tiles, tile(number(queue[0] ? points.at(-1)?.tokens ?? 0 : 0), "tokens per second"), tile(number(queue[0]), "running"), tile(number(queue[1]), "waiting"),
      tile(ms(last.ttft50), "to first token, median"), tile(ms(last.itl50), "between tokens, median"), tile(number(counters.finished ?? 0), "sequences answered"),
      tile(number(counters.preemptions ?? 0), "preemptions"), tile(`${number(counters.swaps_out ?? 0)} / ${number(counters.swaps_in ?? 0)}`, "swaps out / in"), accepted && tile(accepted, "drafts accepted"));
  }

  // ---------------------------------------------------------------- the strip

  drawStrip(node, context) {
    const steps = this.frozen ?? feed.mirror.steps.slice(-SHOWN), width = node.clientWidth, height = node.clientHeight, left = 42, bottom = 18;
    context.clearRect(0, 0, width, height);
    const most = Math.max(1, ...steps.map((step) => step[1])), top = niceCeiling(most), scale = (height - bottom - 6) / top;
    axis(context, width, height, left, bottom, top, " ms");
    const slot = (width - left) / SHOWN, size = Math.max(1, slot - Math.min(2, slot / 4));
    steps.forEach(([, ms, , prefillTokens, decodes, , verifiedTokens], index) => {
      const x = left + (SHOWN - steps.length + index) * slot, tokens = prefillTokens + decodes + verifiedTokens || 1;
      let y = height - bottom;
      for (const [name, count] of [["decode", decodes], ["verify", verifiedTokens], ["prefill", prefillTokens]]) {
        // A part that is there is seen, however small beside the others.
        const part = count ? Math.max(2, ms * scale * (count / tokens)) : 0;
        context.fillStyle = colour(name);
        context.fillRect(x, y - part, size, part);
        y -= part;
      }
    });
    this.geometry = { left, slot, steps };
    this.stripTitle.textContent = steps.length ? `${this.frozen ? "frozen at" : "up to"} step ${number(steps.at(-1)[0])}` : "no step yet";
  }

  hover(event) {
    const { left, slot, steps } = this.geometry ?? {}, box = this.strip.getBoundingClientRect(), x = event.clientX - box.left;
    const step = steps?.[Math.floor((x - left) / slot) - (SHOWN - steps.length)];
    this.tip.hidden = !step;
    if (!step) return;
    const [id, ms, prefillRows, prefillTokens, decodes, verifiedRows, verifiedTokens] = step;
    fill(this.tip, h("div", {}, h("b", {}, `Step ${number(id)}`), ` · ${ms.toFixed(1)} ms`),
      prefillRows > 0 && h("div", {}, `prefill: ${prefillRows} rows, ${number(prefillTokens)} tokens`), decodes > 0 && h("div", {}, `decode: ${decodes} rows`),
      verifiedRows > 0 && h("div", {}, `verify: ${verifiedRows} rows, ${verifiedTokens} tokens`));
    Object.assign(this.tip.style, x > box.width / 2 ? { right: `${box.width - x + 12}px`, left: "auto" } : { left: `${x + 12}px`, right: "auto" }, { top: "8px" });
  }

  // ---------------------------------------------------------------- plots

  plot(title, lines, points, fixed) {
    const now = h("span", {});
    const node = canvas(title, (target, context) => {
      const shown = points(), last = shown.at(-1);
      drawPlot(target, context, shown, lines, { fixed });
      fill(now, lines.map(([name, label, tone], index) => [index ? " · " : "", h("span", { style: { color: `var(--${tone})` } }, label), ` ${last?.[name] === undefined ? "–" : brief(last[name])}`]));
    });
    return { node, card: h("section", { class: "card plot" }, h("h2", {}, title, now), node) };
  }

  // Quantiles of what happened since the last reading, from the server's histograms.
  async readMetrics() {
    let text;
    try { text = await (await call("metrics")).text(); } catch { return; }
    const now = histograms(text, feed.chosen.model), before = this.model === feed.chosen.model ? this.metrics : null, point = { time: performance.now() / 1000 };
    this.metrics = now;
    if (this.model !== feed.chosen.model) this.latencies.length = 0;
    this.model = feed.chosen.model;
    if (!before) return;
    for (const [name, short] of Object.entries(HISTOGRAMS)) {
      const grown = (now[name] ?? []).map(([bound, count], index) => [bound, count - (before[name]?.[index]?.[1] ?? 0)]);
      if (grown.at(-1)?.[1] > 0) for (const share of [50, 95]) point[short + share] = 1000 * quantile(grown, share / 100);
    }
    if (Object.keys(point).length > 1) this.latencies.push(point);
    if (this.latencies.length > 200) this.latencies.shift();
  }
}

// By metric: [bound, count] of its buckets, of one model or of all together.
function histograms(text, model) {
  const found = {};
  for (const line of text.split("\n")) {
    const match = /^(\w+)_bucket\{.*?le="([^"]+)".*?\} (\S+)$/.exec(line);
    if (!match || !HISTOGRAMS[match[1]] || (model && !line.includes(`model_name="${model}"`))) continue;
    const buckets = found[match[1]] ??= [], bound = match[2] === "+Inf" ? Infinity : Number(match[2]);
    const known = buckets.find((bucket) => bucket[0] === bound);
    if (known) known[1] += Number(match[3]); else buckets.push([bound, Number(match[3])]);
  }
  return found;
}

function quantile(buckets, share) {
  const wanted = buckets.at(-1)[1] * share;
  let low = 0, below = 0;
  for (const [bound, count] of buckets) {
    if (count >= wanted) return bound === Infinity ? low : low + (bound - low) * ((wanted - below) / Math.max(1, count - below));
    low = bound;
    below = count;
  }
  return low;
}

const brief = (value) => (value < 10 && value % 1 ? value.toFixed(value < 1 ? 2 : 1) : number(value));

function niceCeiling(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 2.5, 5, 10].map((factor) => factor * power).find((nice) => nice >= value) ?? value;
}

function axis(context, width, height, left, bottom, top, unit) {
  context.font = "11px system-ui, sans-serif";
  context.textAlign = "right";
  context.textBaseline = "middle";
  context.lineWidth = 1;
  for (const share of [0, 0.5, 1]) {
    const y = Math.round(height - bottom - share * (height - bottom - 6)) + 0.5;
    context.strokeStyle = colour("grid");
    context.beginPath();
    context.moveTo(left, y);
    context.lineTo(width, y);
    context.stroke();
    context.fillStyle = colour("dim");
    context.fillText(`${brief(share * top)}${share === 1 ? unit : ""}`, left - 5, y);
  }
}

// Over the last WINDOW seconds; with a `unit`, over all points from the first to the last.
export function drawPlot(node, context, points, lines, { fixed, unit } = {}) {
  const width = node.clientWidth, height = node.clientHeight, left = 38, bottom = 16, end = points.at(-1)?.time ?? 0;
  context.clearRect(0, 0, width, height);
  const begin = unit ? points[0]?.time ?? 0 : end - WINDOW, span = Math.max(1e-9, end - begin);
  const shown = points.filter((point) => unit || point.time > begin);
  const top = fixed ?? niceCeiling(Math.max(unit ? 0.01 : 1, ...shown.flatMap((point) => lines.map(([name]) => point[name] ?? 0))));
  axis(context, width, height, left, bottom, top, "");
  context.fillStyle = colour("dim");
  context.textAlign = "left";
  context.fillText(unit ? `${unit} ${number(begin)}` : `−${WINDOW} s`, left, height - 6);
  context.textAlign = "right";
  context.fillText(unit ? number(end) : "now", width, height - 6);
  for (const [name, , tone] of lines) {
    context.strokeStyle = colour(tone);
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.beginPath();
    shown.filter((point) => !unit || point[name] !== undefined).forEach((point, index) => {
      const x = width - 2 - ((end - point.time) / span) * (width - left - 2), y = height - bottom - Math.min(1, (point[name] ?? 0) / top) * (height - bottom - 6);
      if (index) context.lineTo(x, y); else context.moveTo(x, y);
    });
    context.stroke();
  }
}
