// Memory: the pool as a map, who holds what, and what paging saves.

import { json, keys } from "./api.js";
import { BlockMap, FLASHES, css, ownerColour } from "./blockmap.js";
import { bytes, fill, h, number, plural } from "./dom.js";
import { PHASES, SHARED, feed, stateName } from "./feed.js";
import { clean } from "./markdown.js";

const ENGINES_MS = 2000, LIST_MS = 250, TEXT_MS = 1000, MAX_LISTED = 80, MAX_TABLE = 300;
const LEGEND = [["free", "free", "free"], ["cached", "cached prefix", "cached"], ["adapter", "adapter page", "adapter"], ["idle", "idle adapter", "idle adapter"], ["pinned", "pinned", "pinned"], ["draft", "draft", "draft"]];

// What a view shows instead while the feed cannot be read.
export function locked(error, retry) {
  if (!error || (![400, 401, 403].includes(error.status) && error.code !== "no_model")) return null;
  if (error.status !== 401) return h("div", { class: "splash" }, h("div", { class: "card key" }, h("h1", {}, "Nothing to show here"), h("p", {}, clean(error.message))));
  const input = h("input", { type: "password", autocomplete: "off", required: true, "aria-label": "Admin key" });
  const form = h("form", { class: "card key" }, h("h1", {}, "This view needs the admin key"),
    h("p", { class: "dim" }, "It shows what all users of this server do."), input,
    h("p", { class: "said", role: "alert" }, keys.admin && keys.admin !== keys.api ? "That key is not right." : ""), h("button", { class: "primary" }, "Continue"));
  form.addEventListener("submit", (event) => { event.preventDefault(); keys.admin = input.value.trim(); retry(); });
  return h("div", { class: "splash" }, form);
}

// Which engine Memory and Steps show, where there are several: the models behind one port, or the replicas of one model.
class EngineChooser {
  constructor() {
    this.select = h("select", { onchange: () => feed.choose(JSON.parse(this.select.value)) });
    this.node = h("label", { class: "engines", hidden: true }, "Engine ", this.select);
  }

  show(panel) {
    panel.prepend(this.node);
    this.refresh();
    clearInterval(this.timer);
    this.timer = setInterval(() => this.refresh(), ENGINES_MS);
  }

  hide() { clearInterval(this.timer); }

  async refresh() {
    let choices = [];
    try {
      const models = (await json("v1/models")).data.filter((model) => model.state);
      if (models.length) {
        choices = [["used last", {}], ...models.map(({ id, state }) => [state === "ready" ? id : `${id} (${state})`, { model: id }])];
        this.follow(models.filter((model) => model.state === "ready").sort((one, two) => one.idle_seconds - two.idle_seconds)[0]?.id);
      } else {
        const { replicas } = await json("v1/engine", { admin: true });
        choices = Array.from({ length: replicas }, (_, replica) => [`replica ${replica}`, replica ? { replica } : {}]);
        clearInterval(this.timer); // their number does not change
      }
    } catch { /* the feed says what is wrong */ }
    this.node.hidden = choices.length < 2;
    const said = JSON.stringify(choices);
    if (said === this.said) return; // an open list stays open
    this.said = said;
    fill(this.select, choices.map(([label, chosen]) => h("option", { value: JSON.stringify(chosen) }, clean(label))));
    this.select.value = JSON.stringify(feed.chosen);
  }

  // Without a choice the feed is of the model that was used last when it began.
  follow(last) {
    if (this.last && last && last !== this.last && !feed.chosen.model) feed.choose({});
    this.last = last;
  }
}

export const engines = new EngineChooser();

export function memoryView(panel) {
  return new MemoryView(panel);
}

class MemoryView {
  constructor(panel) {
    this.panel = panel;
    this.box = h("div", {});
    panel.append(this.box);
    this.mirror = feed.mirror;
    this.rows = new Map();
    this.chosen = null; // the number of a sequence
    this.details = new Map(); // by request: {at, promise}
    this.build();
    feed.onrecord(() => this.changed());
  }

  show() {
    this.isShown = true;
    feed.open();
    engines.show(this.panel);
    this.mirror.whole = true;
    this.changed(true);
  }

  hide() {
    this.isShown = false;
    engines.hide();
    feed.close();
  }

  build() {
    this.map = new BlockMap(this.mirror);
    const { canvas } = this.map;
    this.tip = h("div", { class: "tip", hidden: true });
    this.tiles = h("div", { class: "tiles" });
    this.bars = h("div", { class: "card" });
    this.title = h("span", {});
    this.body = h("tbody", {});
    this.more = h("div", { class: "dim" });
    this.table = h("div", { class: "blocks-table" });
    this.tableTitle = h("h2", {});
    this.tableCard = h("section", { class: "card", hidden: true, "aria-label": "Block table" }, this.tableTitle, this.table);
    const flashes = Object.values(FLASHES).map(([name, rgb]) => h("span", {}, h("i", { style: { background: css(rgb), borderRadius: "50%" } }), name));
    this.legend = h("div", { class: "legend" });
    this.content = h("div", {}, this.tiles, h("div", { class: "split" },
      h("div", { class: "stack" },
        h("section", { class: "card" }, h("h2", {}, "Blocks", this.title), h("div", { class: "map-box" }, canvas, this.tip), this.legend,
          h("div", { class: "legend" }, h("span", {}, "Flashes:"), flashes)),
        this.bars),
      h("div", { class: "stack" },
        h("section", { class: "card" }, h("h2", {}, "Requests"), h("div", { class: "scrolled" }, h("table", { class: "requests" },
          h("thead", {}, h("tr", {}, ["Sequence", "Phase", "Tokens", "Blocks"].map((name) => h("th", {}, name)))), this.body), this.more)),
        this.tableCard)));
    canvas.addEventListener("mousemove", (event) => this.hover(this.map.blockAt(event)));
    canvas.addEventListener("mouseleave", () => this.hover(0));
    canvas.addEventListener("click", (event) => this.choose(this.mirror.holders(this.map.blockAt(event))[0]?.[0].n ?? null));
    canvas.addEventListener("keydown", (event) => this.key(event));
    canvas.addEventListener("blur", () => this.hover(0));
  }

  // ---------------------------------------------------------------- records

  changed(now = false) {
    if (!this.isShown) return;
    const lock = locked(feed.error, () => feed.retry());
    if (lock || this.lock) {
      this.lock = lock;
      fill(this.box, lock ?? this.content);
      if (lock) return;
    } else if (!this.content.isConnected) fill(this.box, this.content);
    this.readSize();
    this.map.ask();
    const time = performance.now();
    if (!now && time - (this.listed ?? 0) < LIST_MS) {
      this.late ??= setTimeout(() => { this.late = null; this.changed(true); }, LIST_MS);
      return;
    }
    this.listed = time;
    this.update();
  }

  // Bytes of the pool that is shown: another engine's has another size.
  readSize() {
    const key = JSON.stringify([feed.chosen, this.mirror.num_blocks]);
    if (key === this.sized) return;
    this.sized = key;
    this.pool = null;
    json(feed.path(), { admin: true }).then(({ pool }) => { if (this.sized === key) { this.pool = pool; this.changed(true); } }).catch(() => {});
  }

  update() {
    const { mirror } = this, counts = mirror.counts(), usage = mirror.usage(), { counters } = mirror;
    const share = (part, whole) => (whole ? `${(100 * part / whole).toFixed(part / whole < 0.1 ? 1 : 0)} %` : "–");
    const tile = (value, label) => h("div", { class: "tile" }, h("b", {}, value), h("span", {}, label));
    fill(this.tiles, tile(share(counts.used, mirror.num_blocks), `used of ${number(mirror.num_blocks)} blocks`), tile(number(counts.cached ?? 0), "cached"),
      tile(number(counts.shared ?? 0), "shared"), tile(share(usage.wasted, usage.held * mirror.block_size), "of held memory unfilled"),
      tile(share(counters.prefix_hits ?? 0, counters.prefix_queries ?? 0), "prefix hits"), tile(number(counters.copies ?? 0), "copies on write"),
      tile(number(counters.evictions ?? 0), "evictions seen"), tile(number(counters.preemptions ?? 0), "preemptions"));
    this.title.textContent = `${number(mirror.num_blocks)} × ${mirror.block_size} tokens${this.pool ? `, ${bytes(this.pool.num_bytes)}` : ""} · step ${number(mirror.step)}`;
    this.updateLegend(counts);
    this.updateBars(counts, usage);
    this.updateList();
    this.updateTable();
  }

  updateLegend(counts) {
    const entry = (style, label, count) => h("span", {}, h("i", { style }), `${label} ${number(count)}`);
    fill(this.legend, entry({ background: css(ownerColour(0)) }, "owned, by request", counts.owned ?? 0),
      entry({ background: css(ownerColour(0)), boxShadow: "inset 0 0 0 2px var(--ring)" }, "shared, with its references", counts.shared ?? 0),
      LEGEND.filter(([name, , state]) => ["free", "cached"].includes(name) || counts[state]).map(([name, label, state]) => entry({ background: `var(--${name})` }, label, counts[state] ?? 0)));
  }

  updateBars(counts, usage) {
    const { mirror } = this, all = mirror.num_blocks * mirror.block_size || 1, size = mirror.block_size;
    const part = (tokens, background) => h("i", { style: { width: `${100 * Math.min(1, tokens / all)}%`, background } });
    const bar = (label, text, parts) => [h("div", { class: "bar-label" }, h("span", {}, label), h("span", {}, text)), h("div", { class: "bar" }, parts)];
    const kept = ((counts.adapter ?? 0) + (counts.pinned ?? 0)) * size, saved = usage.logical - usage.held;
    const reserved = usage.reserved * size;
    fill(this.bars, h("h2", {}, "What the memory holds"),
      bar("Now", `${number(usage.filled)} tokens filled · ${number(usage.wasted)} unfilled · ${number((counts.cached ?? 0) * size)} cached`,
        [part(usage.filled, "var(--decode)"), part(usage.wasted, "var(--draft)"), part(kept, "var(--adapter)"), part((counts.cached ?? 0) * size, "var(--cached)")]),
      bar("If each request reserved its maximum", usage.held ? `${number(reserved)} tokens · ${(usage.reserved / Math.max(1, usage.held)).toFixed(1)} × of what is held${reserved > all ? " · does not fit" : ""}` : "–",
        [part(usage.filled, "var(--decode)"), part(reserved - usage.filled, reserved > all ? "var(--bad)" : "var(--draft)")]),
      this.tiers(bar), saved > 0 && h("p", { class: "dim" }, `Sharing saves ${plural(saved, "block")} now.`));
  }

  // Blocks beside the pool: in host memory and on disk.
  tiers(bar) {
    const { host } = this.mirror;
    const tier = (label, used = 0, space = 0, more = "") => space > 0 && bar(label, `${number(used)} of ${number(space)} blocks${more}`,
      [h("i", { style: { width: `${100 * Math.min(1, used / space)}%`, background: "var(--pinned)" } })]);
    return [tier("Swapped out, in host memory", host.swap_used, host.swap_space),
      tier("Evicted prefixes, in host memory", host.offload_used, host.offload_space, host.offload_disk ? ` · ${number(host.offload_disk)} on disk` : "")];
  }

  // ---------------------------------------------------------------- requests

  updateList() {
    const all = [...this.mirror.sequences.values()].sort((a, b) => b.table.length - a.table.length || a.n - b.n);
    const listed = all.slice(0, MAX_LISTED).sort((a, b) => a.n - b.n), alive = new Set(listed.map((one) => one.n));
    for (const [n, row] of this.rows) if (!alive.has(n)) { row.remove(); this.rows.delete(n); }
    for (const one of listed) {
      let row = this.rows.get(one.n);
      if (!row) {
        row = h("tr", { onclick: () => this.choose(one.n === this.chosen ? null : one.n) },
          h("td", {}, h("span", { class: "swatch" }), h("button", { type: "button", class: "plain", title: one.id }, shortName(one))), h("td", {}), h("td", {}), h("td", {}));
        this.rows.set(one.n, row);
        this.body.append(row);
      }
      row.classList.toggle("chosen", one.n === this.chosen);
      row.querySelector(".swatch").style.background = css(ownerColour(one.n));
      const cells = row.querySelectorAll("td");
      cells[1].textContent = PHASES[one.phase] + (one.adapter ? ` · ${one.adapter}` : "");
      cells[2].textContent = `${one.computed}/${one.max}`;
      cells[3].textContent = one.hosts ? `${one.hosts} in host` : one.table.length;
    }
    const rest = all.length - listed.length;
    this.more.textContent = rest ? `and ${plural(rest, "more sequence")}` : all.length ? "" : "No request runs. Ask something in Chat, or send one to the API.";
  }

  choose(n) {
    this.chosen = n;
    this.shownTable = "";
    const one = this.mirror.sequences.get(n);
    this.map.select(one ? new Set(one.table) : null);
    this.changed(true);
  }

  // Tokens of a request, at most one question a second; null if this key may not read them.
  async texts(id) {
    let known = this.details.get(id);
    if (!known || performance.now() - known.at > TEXT_MS) {
      known = { at: performance.now(), promise: json(feed.path(`/requests/${encodeURIComponent(id)}`), { admin: true }).catch(() => known?.promise ?? null) };
      this.details.set(id, known);
      if (this.details.size > 40) this.details.delete(this.details.keys().next().value);
    }
    return known.promise;
  }

  async updateTable() {
    const one = this.mirror.sequences.get(this.chosen);
    if (!one) {
      if (this.chosen !== null && !this.tableCard.hidden) this.tableTitle.replaceChildren("Block table", h("span", {}, "this request has ended"));
      if (this.chosen === null) this.tableCard.hidden = true;
      if (this.map.selected) this.map.select(null);
      return;
    }
    if (this.map.selected && this.map.selected.size !== one.table.length) this.map.select(new Set(one.table));
    const key = `${one.n} ${one.table.length} ${Math.floor(performance.now() / TEXT_MS)}`;
    if (key === this.shownTable) return;
    this.shownTable = key;
    const answer = await this.texts(one.id), sequence = answer?.sequences.find((found) => found.index === one.index);
    if (this.chosen !== one.n) return;
    this.tableCard.hidden = false;
    fill(this.tableTitle, `Block table of ${shortName(one)}`, h("span", {}, `${one.prompt} prompt tokens, ${one.cached} from the cache`));
    const top = this.table.scrollTop;
    fill(this.table, h("div", { class: "dim" }, h("span", {}), h("span", {}, "tokens, by logical block"), h("span", {}), h("span", {}, "block")),
      one.table.slice(0, MAX_TABLE).map((block, index) => this.tableRow(one, sequence, block, index)));
    this.table.scrollTop = top;
  }

  tableRow(one, sequence, block, index) {
    const size = this.mirror.block_size, state = this.mirror.states[block], filled = Math.min(size, Math.max(0, one.computed - index * size));
    const tokens = sequence?.tokens?.slice(index * size, (index + 1) * size);
    const words = tokens ? tokens.map((token, at) => ((index * size + at) % 2 ? h("u", {}, visible(token)) : visible(token))) : `${filled} of ${size} positions`;
    return h("div", {}, h("span", { class: "logical" }, index), h("span", { class: "words" }, words), h("span", { class: "dim" }, "→"),
      h("span", { class: "physical", style: { background: css(ownerColour(this.mirror.owners[block])), boxShadow: state > SHARED ? "inset 0 0 0 2px var(--ring)" : "none" }, title: stateName(state) },
        block, h("small", {}, state > SHARED ? ` ×${state - SHARED}` : filled < size ? ` ${filled}/${size}` : "")));
  }

  // ---------------------------------------------------------------- one block

  key(event) {
    const { map } = this, step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: map.columns, ArrowUp: -map.columns }[event.key];
    if (event.key === "Enter") this.choose(this.mirror.holders(map.cursor)[0]?.[0].n ?? null);
    if (!step) return;
    event.preventDefault();
    this.hover(Math.min(this.mirror.num_blocks, Math.max(1, map.cursor + step)));
  }

  async hover(block) {
    if (block === this.map.cursor && block) return;
    this.map.point(block);
    this.tip.hidden = !block;
    if (!block) return;
    const { mirror } = this, state = mirror.states[block], holders = mirror.holders(block);
    const lines = [h("div", {}, h("b", {}, `Block ${number(block)}`), ` · ${stateName(state)}${state > SHARED ? ` by ${state - SHARED}` : ""}`)];
    for (const [one, index] of holders.slice(0, 4)) {
      lines.push(h("div", {}, `${shortName(one)}, ${PHASES[one.phase]}, positions ${index * mirror.block_size}–${(index + 1) * mirror.block_size - 1}`));
    }
    if (holders.length) lines.push(h("div", {}, `${mirror.fills[block]} of ${mirror.block_size} filled`));
    const words = h("div", { class: "words" });
    fill(this.tip, lines, words);
    const [x, y] = this.map.position(block), width = this.map.canvas.clientWidth;
    Object.assign(this.tip.style, x > width / 2 ? { right: `${width - x + 8}px`, left: "auto" } : { left: `${x + 34}px`, right: "auto" }, { top: `${y + 8}px` });
    if (!holders.length) return;
    const [one, index] = holders[0], answer = await this.texts(one.id);
    const tokens = answer?.sequences.find((found) => found.index === one.index)?.tokens;
    if (this.map.cursor === block && tokens) words.textContent = tokens.slice(index * mirror.block_size, (index + 1) * mirror.block_size).map(visible).join("");
  }
}

export const shortName = (one) => `${one.id.replace(/^(chatcmpl|cmpl)-/, "").slice(0, 8)}·${one.index}`;
const visible = (token) => clean(token).replaceAll("\n", "⏎");
