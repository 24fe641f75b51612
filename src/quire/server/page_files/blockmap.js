// The pool on a canvas: one cell for each block. Cells that did not change are not drawn again.

import { colour, h, isDark } from "./dom.js";
import { SHARED } from "./feed.js";

const FLASH_MS = 800, DETAILED = 9; // device pixels of a cell from which on it shows fill, ring and references
export const FLASHES = {
  hits: ["prefix hit", [38, 201, 120]], copied: ["copy-on-write", [255, 159, 28]], evicted: ["eviction", [238, 66, 73]],
  in: ["swap in", [43, 188, 220]], out: ["swap out", [43, 120, 220]],
};
const NAMES = ["free", "cached", "", "draft", "adapter", "idle", "pinned"];

export function ownerColour(number) {
  const hue = (number * 137.508 + 210) % 360;
  return hsl(hue, isDark() ? 0.55 : 0.58, isDark() ? 0.58 : 0.52);
}

export const css = ([red, green, blue]) => `rgb(${red} ${green} ${blue})`;

function hsl(hue, saturation, lightness) {
  const a = saturation * Math.min(lightness, 1 - lightness);
  const at = (n) => { const k = (n + hue / 30) % 12; return Math.round(255 * (lightness - a * Math.max(-1, Math.min(k - 3, 9 - k, 1)))); };
  return [at(0), at(8), at(4)];
}

const parsed = new Map();
function rgb(name) {
  const text = colour(name);
  if (!parsed.has(text)) parsed.set(text, [1, 3, 5].map((at) => Number.parseInt(text.slice(at, at + 2), 16)));
  return parsed.get(text);
}

const mix = (one, two, share) => one.map((value, i) => Math.round(value + (two[i] - value) * share));

export class BlockMap {
  constructor(mirror) {
    this.mirror = mirror;
    this.canvas = h("canvas", { role: "img", tabindex: "0", "aria-label": "Blocks of the pool. Arrow keys move from block to block." });
    this.flashes = new Map(); // by block: [colour, start]
    this.selected = null; // blocks that are shown alone
    this.cursor = 0; // the block under the mouse or the keyboard
    this.frames = 0;
    this.asked = false;
    this.image = null;
    new ResizeObserver(() => { mirror.whole = true; this.ask(); }).observe(this.canvas.parentElement ?? this.canvas);
    document.addEventListener("quire-theme", () => { mirror.whole = true; this.ask(); });
  }

  ask() {
    if (this.asked || !this.canvas.isConnected) return;
    this.asked = true;
    requestAnimationFrame((now) => { this.asked = false; this.frame(now); });
  }

  select(blocks) {
    this.selected = blocks;
    this.mirror.whole = true;
    this.ask();
  }

  layout() {
    const scale = window.devicePixelRatio || 1, width = Math.floor(this.canvas.parentElement.clientWidth * scale);
    const most = Math.max(260, window.innerHeight - 420) * scale, count = this.mirror.num_blocks;
    if (!width || !count) return false;
    let cell = Math.floor(30 * scale);
    while (cell > 2 && Math.ceil(count / Math.floor(width / cell)) * cell > most) cell -= 1;
    const columns = Math.floor(width / cell), rows = Math.ceil(count / columns), height = rows * cell;
    if (this.cell !== cell || this.columns !== columns || this.canvas.width !== width || this.canvas.height !== height) {
      Object.assign(this, { cell, columns, rows, scale });
      this.canvas.width = width;
      this.canvas.height = height;
      this.canvas.style.height = `${height / scale}px`;
      this.mirror.whole = true;
    }
    return true;
  }

  frame(now) {
    const { mirror } = this;
    if (!this.layout()) return;
    this.frames += 1;
    for (const [kind, block] of mirror.flashes.splice(0)) if (FLASHES[kind]) this.flashes.set(block, [FLASHES[kind][1], now]);
    for (const [block, [, start]] of this.flashes) {
      if (now - start > FLASH_MS) this.flashes.delete(block);
      mirror.dirty.add(block);
    }
    const context = this.canvas.getContext("2d");
    if (this.cell < DETAILED) this.paintPixels(context, now); else this.paintCells(context, now);
    mirror.dirty.clear();
    mirror.whole = false;
    if (this.flashes.size) this.ask();
  }

  colourOf(block, now) {
    const { mirror } = this, state = mirror.states[block];
    let base = state < SHARED && NAMES[state] ? rgb(NAMES[state]) : ownerColour(mirror.owners[block]);
    if (this.selected && !this.selected.has(block)) base = mix(base, rgb("panel"), 0.8);
    const flash = this.flashes.get(block);
    return flash ? mix(base, flash[0], Math.max(0, 1 - (now - flash[1]) / FLASH_MS)) : base;
  }

  // Small cells: pixels of one image, which is put on the canvas whole.
  paintPixels(context, now) {
    const { canvas, mirror, cell, columns } = this;
    if (!this.image || this.image.width !== canvas.width || this.image.height !== canvas.height) {
      this.image = context.createImageData(canvas.width, canvas.height);
      this.pixels = new Uint32Array(this.image.data.buffer);
      mirror.whole = true;
    }
    const { pixels } = this, width = canvas.width, size = cell > 2 ? cell - 1 : cell;
    if (mirror.whole) pixels.fill(packed(rgb("panel")));
    const paint = (block) => {
      const value = packed(this.colourOf(block, now));
      const start = Math.floor((block - 1) / columns) * cell * width + ((block - 1) % columns) * cell;
      for (let y = 0; y < size; y += 1) pixels.fill(value, start + y * width, start + y * width + size);
    };
    if (mirror.whole) for (let block = 1; block <= mirror.num_blocks; block += 1) paint(block);
    else for (const block of mirror.dirty) paint(block);
    context.putImageData(this.image, 0, 0);
  }

  paintCells(context, now) {
    const { mirror } = this;
    if (mirror.whole) {
      context.clearRect(0, 0, this.canvas.width, this.canvas.height);
      for (let block = 1; block <= mirror.num_blocks; block += 1) this.paintCell(context, block, now);
    } else for (const block of mirror.dirty) this.paintCell(context, block, now);
  }

  paintCell(context, block, now) {
    const { mirror, cell, columns } = this, gap = Math.max(1, Math.round(cell / 14)), size = cell - gap;
    const x = ((block - 1) % columns) * cell, y = Math.floor((block - 1) / columns) * cell;
    const state = mirror.states[block], base = this.colourOf(block, now), isDim = this.selected && !this.selected.has(block);
    const isHeld = state === 2 || state === 3 || state > SHARED;
    context.clearRect(x, y, cell, cell);
    const round = Math.min(4, size / 5);
    shape(context, x, y, size, size, round);
    const share = isHeld ? mirror.fills[block] / mirror.block_size : 1;
    context.fillStyle = css(share < 1 ? mix(base, rgb("panel"), 0.68) : base);
    context.fill();
    if (share > 0 && share < 1) {
      context.save();
      context.clip();
      context.fillStyle = css(base);
      context.fillRect(x, y, Math.max(1, size * share), size);
      context.restore();
    }
    if (state > SHARED) this.paintReferences(context, x, y, size, state - SHARED, isDim);
    if (state === 6) { context.fillStyle = "#fff"; context.beginPath(); context.arc(x + size / 2, y + size / 2, size / 7, 0, 7); context.fill(); }
    if (block === this.cursor) { context.strokeStyle = colour("text"); context.lineWidth = 2; shape(context, x + 1, y + 1, size - 2, size - 2, round); context.stroke(); }
  }

  paintReferences(context, x, y, size, count, isDim) {
    const line = Math.max(1, size / 11);
    context.globalAlpha = isDim ? 0.25 : 1;
    context.strokeStyle = colour("ring");
    context.lineWidth = line;
    shape(context, x + line, y + line, size - 2 * line, size - 2 * line, size / 6);
    context.stroke();
    if (size >= 17) {
      context.fillStyle = "#fff";
      context.font = `600 ${Math.round(size * 0.5)}px system-ui, sans-serif`;
      context.textAlign = "center";
      context.textBaseline = "middle";
      context.fillText(String(count), x + size / 2, y + size / 2 + 0.5);
    }
    context.globalAlpha = 1;
  }

  blockAt(event) {
    const box = this.canvas.getBoundingClientRect(), scale = this.scale ?? 1;
    const column = Math.floor(((event.clientX - box.left) * scale) / this.cell), row = Math.floor(((event.clientY - box.top) * scale) / this.cell);
    const block = row * this.columns + column + 1;
    return column >= 0 && column < this.columns && block >= 1 && block <= this.mirror.num_blocks ? block : 0;
  }

  position(block) {
    return [((block - 1) % this.columns) * this.cell / this.scale, Math.floor((block - 1) / this.columns) * this.cell / this.scale];
  }

  point(block) {
    this.mirror.dirty.add(this.cursor).add(block);
    this.mirror.dirty.delete(0);
    this.cursor = block;
    this.ask();
  }
}

const packed = ([red, green, blue]) => (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;

function shape(context, x, y, width, height, radius) {
  context.beginPath();
  context.roundRect(x, y, width, height, radius);
}
