// Builds DOM nodes. Text becomes text nodes: nothing here, and nothing elsewhere on the page, parses HTML.

export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "style") Object.assign(node.style, value);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  add(node, children);
  return node;
}

export function add(node, children) {
  for (const child of children.flat(Infinity)) {
    if (child !== undefined && child !== null && child !== false) node.append(child);
  }
}

export function fill(node, ...children) {
  node.replaceChildren();
  add(node, children);
  return node;
}

const NAMESPACE = "http://www.w3.org/2000/svg";
const ICONS = {
  send: "M3 20l18-8L3 4l3 8-3 8zm3-8h8",
  stop: "M7 7h10v10H7z",
  plus: "M12 5v14M5 12h14",
  close: "M6 6l12 12M18 6L6 18",
  edit: "M4 20h4L19 9l-4-4L4 16v4z",
  again: "M20 12a8 8 0 1 1-2.4-5.7M20 3v5h-5",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  trash: "M5 7h14M10 7V4h4v3M7 7l1 13h8l1-13",
  export: "M12 4v11M8 11l4 4 4-4M5 20h14",
  left: "M15 5l-7 7 7 7",
  right: "M9 5l7 7-7 7",
  sun: "M12 8a4 4 0 1 0 0 8 4 4 0 0 0 0-8M12 2v2M12 20v2M2 12h2M20 12h2M5 5l1.4 1.4M17.6 17.6L19 19M5 19l1.4-1.4M17.6 6.4L19 5",
  moon: "M20 14a8 8 0 1 1-10-10 7 7 0 0 0 10 10z",
  auto: "M12 3a9 9 0 1 0 0 18zM12 3a9 9 0 0 1 0 18",
  tune: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  menu: "M4 7h16M4 12h16M4 17h16",
  check: "M5 12l5 5 9-10",
  upload: "M12 16V5M8 9l4-4 4 4M5 20h14",
  pause: "M8 5v14M16 5v14",
  play: "M7 5l12 7-12 7z",
};

export function icon(name) {
  const svg = document.createElementNS(NAMESPACE, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  const path = document.createElementNS(NAMESPACE, "path");
  path.setAttribute("d", ICONS[name]);
  svg.append(path);
  return svg;
}

export function button(label, name, onclick, attributes = {}) {
  return h("button", { type: "button", class: "icon", title: label, "aria-label": label, onclick, ...attributes }, icon(name));
}

export function field(label, input, hint) {
  return h("label", { class: "field" }, h("span", {}, label), input, hint && h("small", {}, hint));
}

export function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  let unit = 0;
  while (count >= 1000 && unit < units.length - 1) { count /= 1000; unit += 1; }
  return `${count < 10 && unit ? count.toFixed(1) : Math.round(count)} ${units[unit]}`;
}

export const number = (value) => Math.round(value).toLocaleString("en-US");
export const plural = (count, word) => `${number(count)} ${word}${count === 1 ? "" : "s"}`;

// A canvas whose pixels are the screen's; `draw` is called when its size or the colours change.
export function canvas(label, draw) {
  const node = h("canvas", { role: "img", "aria-label": label, tabindex: "0" });
  let asked = false;
  const redraw = () => {
    if (asked || !node.isConnected) return;
    asked = true;
    requestAnimationFrame(() => { asked = false; if (node.clientWidth) draw(node, fitted(node)); });
  };
  new ResizeObserver(redraw).observe(node);
  document.addEventListener("quire-theme", redraw);
  node.redraw = redraw;
  return node;
}

function fitted(node) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.round(node.clientWidth * scale), height = Math.round(node.clientHeight * scale);
  if (node.width !== width || node.height !== height) { node.width = width; node.height = height; }
  const context = node.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  return context;
}

let styles = null, colours = new Map();
document.addEventListener("quire-theme", () => { styles = null; colours = new Map(); });
export function colour(name) {
  styles ??= getComputedStyle(document.documentElement);
  if (!colours.has(name)) colours.set(name, styles.getPropertyValue(`--${name}`).trim());
  return colours.get(name);
}

export const isDark = () => colour("dark") === "1";
