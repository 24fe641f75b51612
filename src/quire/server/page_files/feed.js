// The engine's feed as a mirror: block states, sequences, steps and counters, from records of what changed.

import { call, events } from "./api.js";

export const STATES = ["free", "cached", "owned", "draft", "adapter", "idle adapter", "pinned"];
const OWNED = 2, DRAFT = 3;
export const SHARED = 7; // a byte above it is a shared block with `byte - SHARED` references
export const PHASES = ["waiting", "prefill", "decode", "swapped", "ended"];
const MAX_STEPS = 240, MAX_POINTS = 600;

export const stateName = (state) => (state < SHARED ? STATES[state] : "shared");

class Mirror {
  constructor() {
    this.step = 0;
    this.num_blocks = 0;
    this.block_size = 16;
    this.states = new Uint8Array(1);
    this.owners = new Int32Array(1); // by block: the number of a sequence that holds it
    this.fills = new Uint8Array(1); // by block: positions that hold K and V
    this.sequences = new Map(); // by number
    this.counters = {};
    this.host = {};
    this.queue = [0, 0];
    this.steps = [];
    this.points = []; // one each record: time, rates
    this.flashes = []; // [kind, block], until the map takes them
    this.dirty = new Set();
    this.whole = true; // all blocks are to be drawn
    this.records = 0;
    this.bytes = 0;
  }

  take(record) {
    this.records += 1;
    this.step = record.step;
    if (record.pool) this.reset(record.pool);
    this.takeBlocks(record.blocks);
    this.takeSequences(record);
    for (const [kind, blocks] of Object.entries(record.events)) for (const block of blocks) this.flashes.push([kind, block]);
    if (this.flashes.length > 4000) this.flashes.splice(0, this.flashes.length - 4000);
    for (const step of record.steps) this.steps.push(step);
    if (this.steps.length > MAX_STEPS) this.steps.splice(0, this.steps.length - MAX_STEPS);
    this.takeCounters(record);
  }

  reset({ num_blocks, block_size }) {
    Object.assign(this, { num_blocks, block_size, whole: true });
    this.states = new Uint8Array(num_blocks + 1);
    this.owners = new Int32Array(num_blocks + 1).fill(-1);
    this.fills = new Uint8Array(num_blocks + 1);
    this.sequences.clear();
  }

  takeBlocks(encoded) {
    const data = Uint8Array.from(atob(encoded), (character) => character.charCodeAt(0));
    let at = 0, block = 1;
    const varint = () => {
      let value = 0, shift = 0, byte;
      do { byte = data[at++]; value += (byte & 127) * 2 ** shift; shift += 7; } while (byte > 127);
      return value;
    };
    while (at < data.length) {
      block += varint();
      const end = block + varint(), state = data[at++];
      this.states.fill(state, block, end);
      for (; block < end; block += 1) {
        this.dirty.add(block);
        if (state < SHARED && state !== OWNED && state !== DRAFT) this.fills[block] = this.block_size;
      }
    }
  }

  takeSequences(record) {
    for (const one of record.new ?? []) {
      this.sequences.set(one.n, { ...one, table: [], phase: 0, known: one.prompt, computed: 0, hosts: 0 });
    }
    for (const [n, phase, known, computed, hosts, from, blocks] of record.sequences ?? []) {
      const one = this.sequences.get(n);
      if (!one) continue;
      const before = Math.max(0, Math.floor(Math.min(one.computed, computed) / this.block_size));
      Object.assign(one, { phase, known, computed, hosts });
      if (blocks) {
        one.table.length = from;
        for (const block of blocks) { one.table.push(block); this.owners[block] = n; this.dirty.add(block); }
      }
      for (let i = Math.min(before, from ?? before); i < one.table.length; i += 1) {
        const block = one.table[i], fill = Math.max(0, Math.min(this.block_size, computed - i * this.block_size));
        if (this.fills[block] !== fill) { this.fills[block] = fill; this.dirty.add(block); }
      }
    }
    for (const n of record.gone ?? []) this.sequences.delete(n);
  }

  takeCounters(record) {
    Object.assign(this.counters, record.counters);
    const last = this.points.at(-1);
    // Rates are of the last second: single records would jump.
    const then = this.points.findLast((point) => point.time <= record.time - 1) ?? this.points[0];
    this.queue = record.queue;
    this.host = record.host;
    const seconds = last ? record.time - last.time : 0;
    const rate = (name) => (then && record.time > then.time ? Math.max(0, this.counters[name] - then[name]) / (record.time - then.time) : 0);
    if (last && seconds > 3) this.points.push({ ...last, time: record.time - 0.1, tokens: 0, computed: 0, running: 0, waiting: 0, step_ms: 0 }); // it was idle
    const steps = record.steps.map((step) => step[1]);
    this.points.push({
      time: record.time, tokens: rate("generated_tokens"), computed: rate("computed_tokens"),
      running: record.queue[0], waiting: record.queue[1], step_ms: steps.length ? Math.max(...steps) : 0,
      generated_tokens: this.counters.generated_tokens, computed_tokens: this.counters.computed_tokens,
      used: this.num_blocks ? this.counts().used / this.num_blocks : 0,
    });
    if (this.points.length > MAX_POINTS) this.points.splice(0, this.points.length - MAX_POINTS);
  }

  // Blocks by state, counted from the cells that the map draws.
  counts() {
    const counts = { used: 0 };
    const bins = new Uint32Array(256);
    for (let block = 1; block <= this.num_blocks; block += 1) bins[this.states[block]] += 1;
    bins.forEach((count, state) => { if (count) counts[stateName(state)] = (counts[stateName(state)] ?? 0) + count; });
    counts.used = this.num_blocks - (counts.free ?? 0) - (counts.cached ?? 0) - (counts["idle adapter"] ?? 0);
    return counts;
  }

  // Positions that sequences hold, fill, and would hold if each had reserved its maximum.
  usage() {
    const size = this.block_size, blocks = new Set();
    let filled = 0, logical = 0, reserved = 0;
    for (const one of this.sequences.values()) {
      if (!one.table.length) continue;
      logical += one.table.length;
      reserved += Math.ceil(one.max / size);
      for (const block of one.table) {
        if (!blocks.has(block)) { blocks.add(block); filled += this.fills[block]; }
      }
    }
    return { held: blocks.size, filled, wasted: blocks.size * size - filled, logical, reserved };
  }

  holders(block) {
    const found = [];
    for (const one of this.sequences.values()) {
      const index = one.table.indexOf(block);
      if (index >= 0) found.push([one, index]);
    }
    return found;
  }
}

class Feed {
  constructor() {
    this.mirror = new Mirror();
    this.history = new Map(); // by step: counts of its records; for tests, while `keepHistory` is set
    this.keepHistory = false;
    this.listeners = new Set();
    this.statusListeners = new Set();
    this.users = 0;
    this.error = null;
    this.control = null;
    this.chosen = {}; // of several engines: {model} or {replica}; without a choice, the one that was used last
  }

  path(rest = "") { return `v1/engine${rest}?${new URLSearchParams(this.chosen)}`; }

  choose(chosen) {
    this.chosen = chosen;
    Object.assign(this.mirror, new Mirror());
    this.retry();
    this.notify();
  }

  onstatus(listener) { this.statusListeners.add(listener); }

  onrecord(listener) { this.listeners.add(listener); }

  // A view that shows the engine is open. The connection ends with the last of them.
  open() {
    this.users += 1;
    if (this.users === 1) this.run();
  }

  close() {
    this.users -= 1;
    if (!this.users) this.control?.abort();
  }

  retry() {
    this.error = null;
    this.control?.abort();
    if (this.users) this.run();
  }

  say(text, kind) { for (const listener of this.statusListeners) listener(text, kind); }

  notify() { for (const listener of this.listeners) listener(this.mirror); }

  async run() {
    const control = this.control = new AbortController();
    while (this.users && !control.signal.aborted) {
      try {
        const response = await call(this.path("/events"), { admin: true, signal: control.signal });
        this.error = null;
        this.say("live", "live");
        for await (const record of events(response)) {
          if (control.signal.aborted) break;
          this.mirror.take(record);
          if (this.keepHistory) this.history.set(record.step, [...(this.history.get(record.step) ?? []), this.mirror.counts()]);
          this.notify();
        }
      } catch (error) {
        if (control.signal.aborted) break;
        this.error = error;
        if ([400, 401, 403].includes(error.status)) { this.say("", ""); this.notify(); return; }
        const starts = error.status === 503 || error.code === "engine_dead";
        this.say(error.code === "no_model" ? "no model runs" : starts ? "engine restarting" : "no connection", "lost");
        this.notify();
      }
      await new Promise((resolve) => setTimeout(resolve, 1000));
    }
    if (this.control === control) this.say("", "");
  }
}

export const feed = new Feed();
