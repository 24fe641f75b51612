// The shell: keys, tabs, colours and the state of the server.

import { BASE, json, keys } from "./api.js";
import { fill, h, icon } from "./dom.js";
import { chatView } from "./chat.js";
import { feed } from "./feed.js";

const VERSION = document.querySelector("meta[name=quire-version]").content;
const OPTIONAL = document.querySelector("meta[name=quire-views]").content.split(" "); // views of endpoints that this server has
const views = document.getElementById("views"), tabs = document.getElementById("tabs");
const banner = document.getElementById("banner"), status = document.getElementById("status");

export function tell(message) {
  banner.hidden = !message;
  fill(banner, message, message && h("button", { type: "button", class: "plain", onclick: () => tell("") }, "Close"));
}

// ---------------------------------------------------------------- colours

const THEMES = ["auto", "light", "dark"];
const THEME_ICONS = { auto: "auto", light: "sun", dark: "moon" };

function setTheme(name) {
  localStorage.setItem("quire.theme", name);
  document.documentElement.dataset.theme = name;
  const chooser = document.getElementById("theme");
  fill(chooser, icon(THEME_ICONS[name]));
  chooser.setAttribute("aria-label", `Colours: ${name === "auto" ? "as the system" : name}`);
  document.dispatchEvent(new Event("quire-theme"));
}

setTheme(THEMES.includes(localStorage.getItem("quire.theme")) ? localStorage.getItem("quire.theme") : "auto");
document.getElementById("theme").addEventListener("click", () => {
  setTheme(THEMES[(THEMES.indexOf(document.documentElement.dataset.theme) + 1) % THEMES.length]);
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => setTheme(document.documentElement.dataset.theme));

// ---------------------------------------------------------------- tabs

const VIEWS = [
  { id: "chat", title: "Chat", make: async () => chatView },
  { id: "memory", title: "Memory", make: async () => (await import("./memory.js")).memoryView },
  { id: "steps", title: "Steps", make: async () => (await import("./steps.js")).stepsView },
  { id: "models", title: "Models", make: async () => (await import("./models.js")).modelsView },
  { id: "files", title: "Files", make: async () => (await import("./files.js")).filesView, optional: true },
  { id: "training", title: "Training", make: async () => (await import("./training.js")).trainingView, optional: true },
  { id: "laboratory", title: "Laboratory", make: async () => (await import("./laboratory.js")).laboratoryView, optional: true },
];
const shown = new Map(); // by id: {tab, panel, view}
let current = null;

async function show(id, focus = false) {
  if (!shown.has(id)) id = "chat";
  const next = shown.get(id);
  if (current === next) return;
  current?.view?.hide?.();
  for (const one of shown.values()) {
    one.tab.setAttribute("aria-selected", one === next);
    one.tab.tabIndex = one === next ? 0 : -1;
    one.panel.hidden = one !== next;
  }
  current = next;
  if (location.hash !== `#${id}`) history.replaceState(null, "", `#${id}`);
  if (focus) next.tab.focus();
  checkVersion();
  try {
    next.view ??= (await next.make())(next.panel, { tell });
  } catch (error) { // its file comes from a server that is gone, or of another version
    tell(`This view cannot be loaded (${error.message}): reload the page.`);
    return;
  }
  if (current === next) next.view.show?.();
}

function addTab({ id, title, make }) {
  const tab = h("button", {
    type: "button", role: "tab", id: `tab-${id}`, "aria-controls": `view-${id}`, "aria-selected": "false", tabindex: "-1",
    onclick: () => show(id),
  }, title);
  const panel = h("section", { id: `view-${id}`, class: `view ${id}`, role: "tabpanel", "aria-labelledby": `tab-${id}`, hidden: true });
  tabs.append(tab);
  views.append(panel);
  shown.set(id, { tab, panel, make, view: null });
}

tabs.addEventListener("keydown", (event) => {
  const ids = [...shown.keys()], at = ids.findIndex((id) => shown.get(id) === current);
  const to = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: ids.length - 1 }[event.key];
  if (to === undefined) return;
  event.preventDefault();
  show(ids[(to + ids.length) % ids.length], true);
});
document.addEventListener("keydown", (event) => {
  if (event.altKey && /^[1-9]$/.test(event.key) && [...shown.keys()][event.key - 1]) {
    event.preventDefault();
    show([...shown.keys()][event.key - 1], true);
  }
});
window.addEventListener("hashchange", () => show(location.hash.slice(1)));

// ---------------------------------------------------------------- start

function askForKey(message) {
  const input = h("input", { type: "password", autocomplete: "off", required: true, id: "key", "aria-describedby": "key-said" });
  const said = h("p", { id: "key-said", class: "said", role: "alert" }, message);
  const form = h("form", { class: "card key" },
    h("h1", {}, "This server needs a key"),
    h("p", { class: "dim" }, "It is kept for this tab only, and sent to this server alone."),
    h("label", { for: "key" }, "API key"), input, said, h("button", { class: "primary" }, "Continue"));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    keys.api = input.value.trim();
    start(true);
  });
  fill(views, h("div", { class: "splash" }, form));
  input.focus();
}

async function start(typed = false) {
  try {
    await json("v1/models");
    begin();
  } catch (error) {
    if (error.status === 401) askForKey(typed ? "That key is not right: the server does not know it." : "");
    else {
      fill(views, h("div", { class: "splash" }, h("p", {}, error.status === 503 ? "The engine is starting …" : error.message)));
      setTimeout(() => start(typed), 1000);
    }
  }
}

function begin() {
  views.replaceChildren();
  for (const view of VIEWS) if (!view.optional || OPTIONAL.includes(view.id)) addTab(view);
  show(location.hash.slice(1) || "chat");
}

feed.onstatus((text, kind) => {
  status.hidden = !text;
  status.dataset.kind = kind;
  status.textContent = text;
  if (kind === "live") checkVersion();
});

async function checkVersion() {
  const { version } = await json("version").catch(() => ({ version: VERSION })); // what is asked next says what is wrong
  if (version !== VERSION) tell(`The server is version ${version} and this page is of ${VERSION}: reload it.`);
}

document.addEventListener("visibilitychange", () => { if (!document.hidden) checkVersion(); });
window.quire = { feed, base: BASE.href };
start();
