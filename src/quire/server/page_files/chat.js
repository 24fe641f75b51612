// Chat: streaming answers, branches, several answers side by side, token probabilities.

import { call, events, json } from "./api.js";
import { Conversation, conversations } from "./conversations.js";
import { button, field, fill, h, icon } from "./dom.js";
import { clean, render } from "./markdown.js";

const DEFAULTS = { model: "", system: "", temperature: "", top_p: "", max_tokens: "", n: "1", seed: "", schema: "", tools: "", store: "", tint: false };
const HAS_FILES = document.querySelector("meta[name=quire-views]").content.includes("files");
const SETTINGS = "quire.settings", START_MS = 700;

export function chatView(panel, { tell }) {
  return new ChatView(panel, tell);
}

class ChatView {
  constructor(panel, tell) {
    this.tell = tell;
    this.settings = { ...DEFAULTS, ...stored() };
    this.conversation = conversations.load(conversations.list()[0]?.id) ?? new Conversation();
    this.running = null; // {control, nodes} while answers come
    this.shown = new Map(); // by message: its element
    this.build(panel);
    this.renderAll();
  }

  show() {
    this.input.focus();
    this.loadModels();
  }

  build(panel) {
    this.list = h("ul", { class: "chats" });
    this.side = h("aside", { class: "side", "aria-label": "Conversations" },
      h("button", { type: "button", class: "wide", onclick: () => this.open(new Conversation()) }, icon("plus"), "New chat"), this.list);
    this.thread = h("div", { class: "thread", role: "log", "aria-label": "Conversation", onpointerdown: () => this.uncover() });
    this.input = h("textarea", { rows: "1", placeholder: "Ask something …", "aria-label": "Message", onkeydown: (event) => this.key(event), oninput: () => this.grow() });
    this.send = button("Send", "send", () => (this.running ? this.stop() : this.submit()), { class: "icon send" });
    this.model = h("select", { "aria-label": "Model", onchange: () => this.set("model", this.model.value) });
    const tools = h("div", { class: "composer-tools" }, this.model,
      button("Conversations", "menu", () => this.side.classList.toggle("open"), { class: "icon narrow-only" }),
      button("Settings", "tune", () => { this.drawer.hidden = !this.drawer.hidden; }, { id: "chat-settings" }),
      button("Export as Markdown", "export", () => this.download()));
    this.composer = h("form", { class: "composer", onsubmit: (event) => { event.preventDefault(); this.submit(); } },
      h("div", { class: "composer-box" }, this.input, this.send), tools);
    this.drawer = this.buildSettings();
    fill(panel, this.side, h("div", { class: "talk" }, this.thread, this.composer), this.drawer);
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || panel.hidden) return;
      if (this.running) this.stop(); else this.uncover();
    });
    window.addEventListener("beforeunload", () => this.stop()); // what has come of an answer is kept
  }

  buildSettings() {
    const bound = (name, node) => {
      if (node.type === "checkbox") node.checked = this.settings[name]; else node.value = this.settings[name];
      node.addEventListener("input", () => this.set(name, node.type === "checkbox" ? node.checked : node.value));
      return node;
    };
    const numeric = (name, min, max, step, hint) => bound(name, h("input", { type: "number", min, max, step, placeholder: hint, name }));
    this.store = h("select", { name: "store", onchange: () => this.set("store", this.store.value) });
    this.storeField = field("Answer from files", this.store, "Passages of the store are searched and cited.");
    this.storeField.hidden = true;
    const tint = bound("tint", h("input", { type: "checkbox", name: "tint" }));
    tint.addEventListener("input", () => this.renderAll());
    return h("aside", { class: "drawer", "aria-label": "Settings", hidden: true },
      h("h2", {}, "Settings", button("Close the settings", "close", () => this.uncover(), { class: "icon narrow-only" })),
      field("System prompt", bound("system", h("textarea", { rows: "3", name: "system", placeholder: "The model's own" }))),
      h("div", { class: "pair" },
        field("Temperature", numeric("temperature", 0, 2, 0.05, "default")), field("Top-p", numeric("top_p", 0, 1, 0.01, "default"))),
      h("div", { class: "pair" },
        field("Max tokens", numeric("max_tokens", 1, 1000000, 1, "no limit")), field("Seed", numeric("seed", 0, 2147483647, 1, "random"))),
      field("Answers side by side", numeric("n", 1, 8, 1, "1")),
      h("label", { class: "check" }, tint, "Show token probabilities"),
      this.storeField,
      field("JSON schema", bound("schema", h("textarea", { rows: "4", name: "schema", spellcheck: "false", placeholder: '{"type": "object", …}' })), "The answer must match it."),
      field("Tools", bound("tools", h("textarea", { rows: "4", name: "tools", spellcheck: "false", placeholder: '[{"type": "function", …}]' })), "Functions, as the API takes them."));
  }

  set(name, value) {
    this.settings[name] = value;
    localStorage.setItem(SETTINGS, JSON.stringify(this.settings));
  }

  async loadModels() {
    try {
      const { data } = await json("v1/models");
      const chat = data.filter((model) => model.task !== "embed");
      fill(this.model, chat.map((model) => h("option", { value: model.id }, model.parent ? `${model.id} (adapter)` : model.id)));
      if (chat.some((model) => model.id === this.settings.model)) this.model.value = this.settings.model;
      if (HAS_FILES) this.showStores((await json("v1/vector_stores")).data);
    } catch { /* the next question says what is wrong */ }
  }

  showStores(stores) {
    if (this.settings.store && !stores.some((store) => store.id === this.settings.store)) this.set("store", "");
    fill(this.store, h("option", { value: "" }, "no files"), stores.map((store) => h("option", { value: store.id }, clean(store.name || store.id))));
    this.store.value = this.settings.store;
    this.storeField.hidden = !stores.length;
  }

  // ---------------------------------------------------------------- conversations

  open(conversation) {
    if (conversation !== this.conversation) this.stop();
    this.conversation = conversation;
    this.side.classList.remove("open");
    this.renderAll();
    this.input.focus();
  }

  renderList() {
    fill(this.list, conversations.list().map(({ id, title }) => h("li", { class: id === this.conversation.id ? "current" : "" },
      h("button", { type: "button", class: "plain", onclick: () => this.open(id === this.conversation.id ? this.conversation : conversations.load(id) ?? new Conversation()) }, clean(title) || "New chat"),
      button("Delete", "trash", () => { conversations.remove(id); if (id === this.conversation.id) this.open(new Conversation()); else this.renderList(); }))));
  }

  download() {
    const name = (this.conversation.title || "chat").replace(/[^\w -]/g, "").slice(0, 40);
    const address = URL.createObjectURL(new Blob([this.conversation.markdown()], { type: "text/markdown" }));
    const link = h("a", { href: address, download: `${name}.md` });
    link.click();
    URL.revokeObjectURL(address);
  }

  // ---------------------------------------------------------------- messages

  renderAll() {
    this.renderList();
    this.shown.clear();
    const path = this.conversation.path();
    fill(this.thread, path.length ? path.map((node) => this.turn(node)) : this.welcome());
    this.scroll(true);
  }

  welcome() {
    const ideas = ["Explain paged attention in three sentences.", "Write a haiku about memory.", "List three uses of a hash table."];
    return h("div", { class: "welcome" }, h("h1", {}, "What would you like to know?"),
      h("p", { class: "dim" }, "Ask here, then open Memory to see the blocks that the answer takes."),
      h("div", { class: "ideas" }, ideas.map((idea) => h("button", { type: "button", onclick: () => { this.input.value = idea; this.submit(); } }, idea))));
  }

  turn(node) {
    const group = this.conversation.group(node);
    if (node.role !== "assistant") return this.userTurn(node);
    const columns = group.map((one) => this.answer(one, group.length > 1 && one === node));
    return h("article", { class: "turn assistant" }, h("div", { class: group.length > 1 ? "columns" : "" }, columns),
      h("footer", {}, this.switcher(node), button("Answer again", "again", () => this.again(node), { class: "icon again" })));
  }

  userTurn(node) {
    const text = h("div", { class: "text user-text" }, clean(node.content));
    const turn = h("article", { class: "turn user" }, text,
      h("footer", {}, this.switcher(node), button("Edit", "edit", () => this.edit(node, turn), { class: "icon edit" }), this.copier(node)));
    return turn;
  }

  copier(node) { return button("Copy", "copy", () => navigator.clipboard?.writeText(node.content)); }

  switcher(node) {
    const branches = this.conversation.branches(node);
    if (branches.length < 2) return null;
    const at = branches.findIndex((one) => one === node || (one.group && one.group === node.group));
    const go = (to) => { if (!this.running) { this.conversation.choose(branches[to]); this.save(); this.renderAll(); } };
    return h("span", { class: "branches" },
      button("Earlier branch", "left", () => go(at - 1), { disabled: at === 0 }), h("span", {}, `${at + 1}/${branches.length}`),
      button("Later branch", "right", () => go(at + 1), { disabled: at === branches.length - 1 }));
  }

  answer(node, chosen) {
    const body = h("div", { class: "text" }), foot = h("div", { class: "facts dim" }), error = h("div", {});
    const element = h("div", { class: `answer${chosen ? " chosen" : ""}`, "data-id": node.id }, body, error, foot);
    this.shown.set(node.id, { body, foot, error, tokens: 0 });
    this.paint(node);
    return element;
  }

  // Shows a node as it is now; while it grows, only its end changes.
  paint(node) {
    const shown = this.shown.get(node.id);
    if (!shown) return;
    const { body, foot, error } = shown;
    if (this.settings.tint && node.tokens?.length) paintTokens(shown, node.tokens);
    else if (node.content) render(body, node.content);
    else if (node.state === "open") fill(body, h("span", { class: "typing", "aria-label": "The model is thinking" }));
    if (node.reasoning) body.prepend(this.reasoning(node, body));
    if (node.calls?.length) fill(error, node.calls.map((one) => h("pre", { class: "toolcall" }, clean(`${one.name}(${one.arguments})`))));
    if (node.error) {
      fill(error, h("div", { class: "failure", role: "alert" }, h("span", {}, node.error),
        h("button", { type: "button", onclick: () => this.again(node) }, "Try again")));
    }
    const group = this.conversation.group(node), isChosen = this.conversation.chosen[node.parent] === node.id;
    fill(foot, node.sources?.length && h("span", { class: "sources" }, `From ${clean(node.sources.join(", "))}`), facts(node), node.state === "open" && !node.content && this.running?.said, node.content && node.state !== "open" && this.copier(node),
      group.length > 1 && !isChosen && h("button", { type: "button", class: "plain", onclick: () => { this.conversation.choose(node); this.save(); this.renderAll(); } }, "Go on with this one"));
  }

  reasoning(node, body) {
    const open = body.querySelector("details")?.open ?? false;
    body.querySelector("details")?.remove();
    return h("details", { open }, h("summary", {}, "Reasoning"), h("pre", {}, clean(node.reasoning)));
  }

  edit(node, turn) {
    if (this.running) return;
    const text = h("textarea", { rows: "3", "aria-label": "Edit the message", value: node.content });
    const done = () => {
      if (!text.value.trim()) return;
      const sibling = this.conversation.add(node.parent, { role: "user", content: text.value });
      this.ask(sibling);
    };
    text.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); done(); }
      if (event.key === "Escape") this.renderAll();
    });
    fill(turn, h("div", { class: "editing" }, text, h("div", {},
      h("button", { type: "button", class: "primary", onclick: done }, "Send as a branch"),
      h("button", { type: "button", onclick: () => this.renderAll() }, "Cancel"))));
    text.focus();
  }

  again(node) {
    if (this.running) return;
    const parent = this.conversation.nodes[node.parent];
    if (parent) this.ask(parent);
  }

  // ---------------------------------------------------------------- asking

  key(event) {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      if (!this.running) this.submit();
    }
  }

  grow() {
    this.input.style.height = "auto";
    this.input.style.height = `${Math.min(this.input.scrollHeight, 200)}px`;
  }

  submit() {
    const text = this.input.value.trim();
    if (!text || this.running) return;
    try { this.body(null); } catch (error) { this.tell(error.message); return; } // settings that cannot be sent: the text stays
    this.input.value = "";
    this.grow();
    this.conversation.title ||= text.slice(0, 60);
    const last = this.conversation.path().at(-1);
    this.ask(this.conversation.add(last?.id ?? "", { role: "user", content: text }));
  }

  body(user) {
    const { settings } = this, body = { model: this.model.value || undefined, messages: [], stream: true, stream_options: { include_usage: true } };
    if (settings.system.trim()) body.messages.push({ role: "system", content: settings.system });
    const messages = [];
    for (let node = user; node; node = this.conversation.nodes[node.parent]) if (node.content) messages.unshift({ role: node.role, content: node.content });
    body.messages.push(...messages);
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) if (settings[name] !== "") body[name] = Number(settings[name]);
    if (Number(settings.n) > 1) body.n = Number(settings.n);
    if (settings.tint) Object.assign(body, { logprobs: true, top_logprobs: 3 });
    if (settings.schema.trim()) body.response_format = { type: "json_schema", json_schema: { name: "answer", schema: parsed(settings.schema, "JSON schema") } };
    if (settings.tools.trim()) body.tools = parsed(settings.tools, "tools");
    if (settings.store) body.tools = [...(body.tools ?? []), { type: "file_search", vector_store_ids: [settings.store] }];
    return body;
  }

  async ask(user) {
    const { conversation } = this; // another one may be open when this answer ends
    let body;
    try { body = this.body(user); } catch (error) { this.tell(error.message); this.renderAll(); return; }
    const count = body.n ?? 1, group = count > 1 ? `group ${user.id} ${Date.now()}` : undefined;
    const nodes = Array.from({ length: count }, () => this.conversation.add(user.id, { role: "assistant", content: "", state: "open", group }));
    this.conversation.choose(nodes[0]);
    this.running = { control: new AbortController(), nodes };
    this.save();
    this.renderAll();
    this.setBusy(true);
    this.tellStart(this.running, body.model);
    const started = performance.now();
    try {
      const response = await call("v1/chat/completions", { body, signal: this.running.control.signal });
      for await (const chunk of events(response)) this.grown(nodes, chunk, started);
    } catch (error) {
      for (const node of nodes) {
        if (error.name === "AbortError") node.stopped = true;
        else node.error = clean(error.message);
      }
    } finally {
      for (const node of nodes) { node.state = "done"; this.paint(node); }
      this.running = null;
      this.setBusy(false);
      if (conversations.list().some(({ id }) => id === conversation.id)) this.save(conversation); // it was not deleted meanwhile
      this.renderList();
    }
  }

  // Before the first word: how far a model is that is started for this question.
  async tellStart(running, id) {
    const waits = () => this.running === running && !running.nodes.some((node) => node.count);
    while (waits()) {
      await new Promise((resolve) => setTimeout(resolve, START_MS));
      const { data } = await json("v1/models").catch(() => ({ data: [] })), model = data.find((one) => one.id === id);
      if (!model?.state || !waits()) return;
      running.said = model.state === "ready" ? "" : clean(`${id} is ${model.state}${model.progress ? `: ${model.progress}` : ""}`);
      for (const node of running.nodes) this.paint(node);
    }
  }

  grown(nodes, chunk, started) {
    for (const { index, delta, finish_reason, logprobs } of chunk.choices ?? []) {
      const node = nodes[index];
      if (!node) continue;
      if (delta?.content) {
        node.content += delta.content;
        node.first ??= performance.now() - started;
        node.last = performance.now() - started;
      }
      if (delta?.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
      if (delta?.annotations?.length) node.sources = [...new Set(delta.annotations.map((note) => (note.file_citation ?? note).filename).filter(Boolean))];
      for (const part of delta?.tool_calls ?? []) {
        node.calls ??= [];
        const one = node.calls[part.index] ??= { name: "", arguments: "" };
        one.name += part.function?.name ?? "";
        one.arguments += part.function?.arguments ?? "";
      }
      for (const token of logprobs?.content ?? []) {
        (node.tokens ??= []).push([token.token, token.logprob, token.top_logprobs.map((top) => [top.token, top.logprob])]);
      }
      node.exact = Boolean(node.tokens); // a piece of text may be several tokens
      node.count = node.tokens?.length ?? (node.count ?? 0) + (delta?.content ? 1 : 0);
      if (finish_reason) node.finish = finish_reason;
      // The token that ended the answer is no part of its text.
      if (finish_reason === "stop" && node.tokens?.length && !node.content.endsWith(node.tokens.at(-1)[0])) node.tokens.pop();
      this.later(node);
    }
    if (chunk.usage && nodes.length === 1) Object.assign(nodes[0], { count: chunk.usage.completion_tokens, exact: true });
  }

  // Paints once a frame, however fast tokens come.
  later(node) {
    this.due ??= new Set();
    if (!this.due.size) {
      requestAnimationFrame(() => {
        const atEnd = this.isAtEnd();
        for (const one of this.due) this.paint(one);
        this.due.clear();
        if (atEnd) this.scroll();
      });
    }
    this.due.add(node);
  }

  stop() { this.running?.control.abort(); }

  // Closes what lies over the conversation on a narrow screen.
  uncover() {
    this.side.classList.remove("open");
    if (getComputedStyle(this.drawer).position === "fixed") this.drawer.hidden = true;
  }

  setBusy(busy) {
    fill(this.send, icon(busy ? "stop" : "send"));
    this.send.setAttribute("aria-label", busy ? "Stop" : "Send");
    this.send.title = busy ? "Stop (Esc)" : "Send";
    this.thread.setAttribute("aria-busy", busy);
  }

  save(conversation = this.conversation) {
    if (!conversations.save(conversation)) this.tell("The browser's storage is full: this conversation is not kept.");
  }

  isAtEnd() { return this.thread.scrollHeight - this.thread.scrollTop - this.thread.clientHeight < 80; }

  scroll() { this.thread.scrollTop = this.thread.scrollHeight; }
}

function stored() {
  try { return JSON.parse(localStorage.getItem(SETTINGS)) ?? {}; } catch { return {}; }
}

function parsed(text, what) {
  try { return JSON.parse(text); } catch (error) { throw new Error(`Settings, ${what}: ${error.message}`); }
}

function facts(node) {
  const parts = [];
  const exact = node.exact || node.state === "open";
  if (node.count) parts.push(`${exact ? "" : "at least "}${node.count} tokens`);
  if (exact && node.count > 1 && node.last > node.first) parts.push(`${((node.count - 1) / ((node.last - node.first) / 1000)).toFixed(1)} tokens/s`);
  if (node.first) parts.push(`first after ${(node.first / 1000).toFixed(2)} s`);
  if (node.stopped) parts.push("stopped");
  if (node.finish === "length") parts.push("cut at the maximum length");
  return h("span", {}, parts.join(" · "));
}

// Each token with a tint: the less likely it was, the stronger.
function paintTokens(shown, tokens) {
  if (!shown.tinted) { fill(shown.body); shown.tinted = h("p", { class: "tokens" }); shown.body.append(shown.tinted); shown.tokens = 0; }
  for (; shown.tokens > tokens.length; shown.tokens -= 1) shown.tinted.lastChild.remove();
  for (; shown.tokens < tokens.length; shown.tokens += 1) {
    const [text, logprob, top] = tokens[shown.tokens];
    const probability = Math.exp(logprob);
    const others = (top ?? []).map(([other, value]) => `${JSON.stringify(other)} ${(100 * Math.exp(value)).toFixed(1)} %`);
    const level = Math.min(5, Math.floor((1 - probability) * 6));
    shown.tinted.append(h("span", { class: `p${level}`, title: `${(100 * probability).toFixed(1)} %\n${others.join("\n")}` }, clean(text)));
  }
}
