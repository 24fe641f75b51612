// Markdown as DOM nodes. It only makes elements of a fixed list and text nodes; links go to http and https alone.

import { button, h } from "./dom.js";

const MAX_COLUMNS = 40, MAX_ROWS = 400, MAX_DEPTH = 6, MAX_INLINE = 20000;
const FENCE = /^(\s{0,3})(`{3,}|~{3,})\s*([\w+#.-]*)[^`]*$/;
const HEADING = /^(#{1,6})\s+(.*?)\s*#*$/;
const RULE = /^\s{0,3}([-*_])(\s*\1){2,}\s*$/;
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])\s+(.*)$/;
const DIVIDER = /^\s*\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/;
// Control characters that would change how the text around them is read: shown as a sign.
const CONTROL = /[\u0000-\u0008\u000b-\u001f\u007f-\u009f\u200e\u200f\u202a-\u202e\u2066-\u2069]/g;

export const clean = (text) => text.replace(CONTROL, "\ufffd");

// Shows `text` in `node`; blocks that are as before are kept, so a growing answer costs only its end.
export function render(node, text) {
  const sources = blocks(clean(text).split("\n"));
  const shown = node.markdown ?? [];
  let same = 0;
  while (same < shown.length && same < sources.length && shown[same].key === sources[same].key) same += 1;
  while (node.childNodes.length > same) node.lastChild.remove();
  for (const source of sources.slice(same)) node.append(source.build());
  node.markdown = sources;
}

function blocks(lines, depth = 0) {
  const found = [];
  const push = (kind, source, build) => found.push({ key: `${kind}\u0000${source}`, build });
  for (let at = 0; at < lines.length;) {
    const line = lines[at];
    if (!line.trim()) { at += 1; continue; }
    const start = at, fence = FENCE.exec(line), heading = HEADING.exec(line);
    if (fence) {
      at += 1;
      while (at < lines.length && !closes(lines[at], fence[2])) at += 1;
      const code = lines.slice(start + 1, at).join("\n");
      at += 1;
      push("code", `${fence[3]}\n${code}`, () => codeBlock(code, fence[3]));
    } else if (heading) {
      at += 1;
      push("heading", line, () => h(`h${Math.min(6, heading[1].length + 2)}`, {}, inline(heading[2])));
    } else if (RULE.test(line)) {
      at += 1;
      push("rule", "", () => h("hr"));
    } else if (/^\s{0,3}>/.test(line) && depth < MAX_DEPTH) {
      while (at < lines.length && /^\s{0,3}>/.test(lines[at])) at += 1;
      const inner = lines.slice(start, at).map((quoted) => quoted.replace(/^\s{0,3}>\s?/, ""));
      push("quote", inner.join("\n"), () => h("blockquote", {}, blocks(inner, depth + 1).map((block) => block.build())));
    } else if (ITEM.test(line) && depth < MAX_DEPTH) {
      at = endOfList(lines, at);
      const inner = lines.slice(start, at);
      push("list", inner.join("\n"), () => list(inner, depth));
    } else if (line.includes("|") && at + 1 < lines.length && DIVIDER.test(lines[at + 1]) && lines[at + 1].includes("-")) {
      at += 2;
      while (at < lines.length && lines[at].includes("|") && lines[at].trim()) at += 1;
      const rows = lines.slice(start, at);
      push("table", rows.join("\n"), () => table(rows));
    } else {
      at += 1;
      while (at < lines.length && lines[at].trim() && !begins(lines[at])) at += 1;
      const text = lines.slice(start, at).join("\n");
      push("text", text, () => h("p", {}, inline(text)));
    }
  }
  return found;
}

const begins = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || ITEM.test(line) || /^\s{0,3}>/.test(line);
const closes = (line, fence) => line.trim().startsWith(fence) && !line.trim().slice(fence.length).replaceAll(fence[0], "");

function endOfList(lines, at) {
  let end = at;
  for (; end < lines.length; end += 1) {
    const line = lines[end];
    if (!line.trim()) {
      const next = lines[end + 1];
      if (next === undefined || !(ITEM.test(next) || /^\s{2,}\S/.test(next))) break;
    } else if (end > at && !ITEM.test(line) && !/^\s{2,}/.test(line) && begins(line)) break;
  }
  return end;
}

function list(lines, depth) {
  const first = ITEM.exec(lines[0]);
  const ordered = /\d/.test(first[2]);
  const indent = first[1].length;
  const items = [];
  for (const line of lines) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= indent + 1) items.push([item[3]]);
    else items.at(-1).push(line.slice(Math.min(line.length - line.trimStart().length, indent + 2)));
  }
  const start = ordered ? Number.parseInt(first[2], 10) : 1;
  return h(ordered ? "ol" : "ul", { start: ordered && start !== 1 ? start : undefined },
    items.map((item) => {
      const inner = blocks(item, depth + 1);
      const nodes = inner.map((block) => block.build());
      // A tight item has no paragraph around its text.
      return h("li", {}, nodes.map((node, index) => (node.tagName === "P" && index === 0 ? [...node.childNodes] : node)));
    }));
}

function table(lines) {
  const cells = (line) => line.trim().replace(/^\|/, "").replace(/\|$/, "").split("|").slice(0, MAX_COLUMNS);
  const head = cells(lines[0]), rows = lines.slice(2, 2 + MAX_ROWS);
  const left = lines.length - 2 - rows.length;
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, head.map((cell) => h("th", {}, inline(cell.trim()))))),
    h("tbody", {}, rows.map((row) => h("tr", {}, cells(row).map((cell) => h("td", {}, inline(cell.trim()))))))),
    left > 0 && h("p", { class: "dim" }, `${left} more rows`));
}

function codeBlock(code, language) {
  const copy = button("Copy", "copy", () => navigator.clipboard?.writeText(code));
  return h("div", { class: "code" }, h("div", { class: "code-head" }, h("span", {}, language || "text"), copy), h("pre", {}, h("code", {}, code)));
}

const INLINE = /(`+)([\s\S]+?)\1(?!`)|(\*\*|__)(?=\S)([\s\S]+?\S?)\3|(\*|_)(?=\S)([^\n]*?\S)\5|~~(?=\S)([\s\S]+?)~~|\[([^\]\n]{1,500})\]\(([^()\s]{1,2000})\)|(https?:\/\/[^\s<>"'`\])]+)|\\([\\`*_{}[\]()#+.!~|>-])/g;

export function inline(text, depth = 0) {
  if (depth > MAX_DEPTH || text.length > MAX_INLINE) return [text];
  const nodes = [];
  let end = 0;
  for (const match of text.matchAll(INLINE)) {
    const [whole, tick, code, bold, strong, italic, emphasis, struck, label, target, bare, escaped] = match;
    // An underscore inside a word is no emphasis: snake_case stays as it is.
    if ((italic === "_" || bold === "__") && /\w/.test(text[match.index - 1] ?? "")) continue;
    if (match.index < end) continue;
    if (match.index > end) nodes.push(text.slice(end, match.index));
    end = match.index + whole.length;
    if (tick) nodes.push(h("code", {}, code.trim() || code));
    else if (bold) nodes.push(h("strong", {}, inline(strong, depth + 1)));
    else if (italic) nodes.push(h("em", {}, inline(emphasis, depth + 1)));
    else if (struck) nodes.push(h("s", {}, inline(struck, depth + 1)));
    else if (label) nodes.push(link(target, inline(label, depth + 1), whole));
    else if (bare) nodes.push(link(bare, [bare], bare));
    else nodes.push(escaped);
  }
  if (end < text.length) nodes.push(text.slice(end));
  return nodes;
}

function link(target, label, source) {
  let address;
  try { address = new URL(target); } catch { return source; }
  if (address.protocol !== "http:" && address.protocol !== "https:") return source;
  return h("a", { href: address.href, target: "_blank", rel: "noopener noreferrer nofollow" }, label);
}
