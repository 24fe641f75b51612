// Conversations: trees of messages, kept in this browser only. Editing and regenerating add branches.

const INDEX = "quire.chats", PREFIX = "quire.chat.";
let counter = 0;
const newId = () => `${Date.now().toString(36)}${(counter += 1).toString(36)}${Math.floor(Math.random() * 1e6).toString(36)}`;

export class Conversation {
  constructor(data = {}) {
    this.id = data.id ?? newId();
    this.title = data.title ?? "";
    this.at = data.at ?? Date.now();
    this.settings = data.settings ?? {};
    this.nodes = data.nodes ?? {}; // by id: {id, parent, role, content, …}
    this.chosen = data.chosen ?? {}; // by parent: the child that is shown; "" is the root
  }

  children(parent = "") {
    return Object.values(this.nodes).filter((node) => node.parent === parent);
  }

  add(parent, fields) {
    const node = { id: newId(), parent, ...fields };
    this.nodes[node.id] = node;
    this.chosen[parent] = node.id;
    return node;
  }

  // The messages that are shown, from the first to the last.
  path() {
    const nodes = [];
    for (let parent = ""; ;) {
      const node = this.nodes[this.chosen[parent]] ?? this.children(parent).at(-1);
      if (!node) return nodes;
      nodes.push(node);
      parent = node.id;
    }
  }

  // Branches beside a node: answers of one group stand side by side and count as one.
  branches(node) {
    const branches = [];
    for (const one of this.children(node.parent)) {
      if (!one.group || branches.at(-1)?.group !== one.group) branches.push(one);
    }
    return branches;
  }

  group(node) {
    return node.group ? this.children(node.parent).filter((one) => one.group === node.group) : [node];
  }

  choose(node) {
    this.chosen[node.parent] = node.id;
  }

  markdown() {
    const names = { user: "You", assistant: "Model", system: "System" };
    return this.path().map((node) => `## ${names[node.role] ?? node.role}\n\n${node.content}`).join("\n\n");
  }
}

export const conversations = {
  list() {
    try { return JSON.parse(localStorage.getItem(INDEX)) ?? []; } catch { return []; }
  },

  load(id) {
    try {
      const loaded = new Conversation(JSON.parse(localStorage.getItem(PREFIX + id)));
      for (const node of Object.values(loaded.nodes)) if (node.state === "open") Object.assign(node, { state: "done", stopped: true }); // the page was left
      return loaded;
    } catch { return null; }
  },

  // Old conversations make room for new ones when the browser's storage is full.
  save(conversation) {
    conversation.at = Date.now();
    const others = this.list().filter((entry) => entry.id !== conversation.id);
    const index = [{ id: conversation.id, title: conversation.title, at: conversation.at }, ...others];
    for (;;) {
      try {
        localStorage.setItem(PREFIX + conversation.id, JSON.stringify(conversation));
        localStorage.setItem(INDEX, JSON.stringify(index));
        return true;
      } catch {
        if (index.length < 2) return false;
        localStorage.removeItem(PREFIX + index.pop().id);
      }
    }
  },

  remove(id) {
    localStorage.removeItem(PREFIX + id);
    localStorage.setItem(INDEX, JSON.stringify(this.list().filter((entry) => entry.id !== id)));
  },
};
