// Talks with the server that this file came from, behind any path prefix.

export const BASE = new URL("../", import.meta.url);
const KEY = "quire.key", ADMIN = "quire.admin";

export const keys = {
  get api() { return sessionStorage.getItem(KEY) ?? ""; },
  set api(value) { sessionStorage.setItem(KEY, value); },
  get admin() { return sessionStorage.getItem(ADMIN) || this.api; },
  set admin(value) { sessionStorage.setItem(ADMIN, value); },
};

export class ApiError extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export async function call(path, { method, body, form, admin = false, signal } = {}) {
  const headers = {};
  const key = admin ? keys.admin : keys.api;
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    response = await fetch(new URL(path, BASE), {
      method: method ?? (body !== undefined || form ? "POST" : "GET"),
      headers, signal, body: form ?? (body === undefined ? undefined : JSON.stringify(body)),
    });
  } catch (fault) {
    if (fault.name === "AbortError") throw fault;
    throw new ApiError("The server does not answer. Is it still running?", 0, "unreachable");
  }
  if (response.status === 401 && !admin) throw new ApiError("The server does not accept this page's key: reload the page to enter another one.", 401);
  if (!response.ok) throw await failure(response);
  return response;
}

export const json = async (path, options) => (await call(path, options)).json();

async function failure(response) {
  let error = {};
  try { error = (await response.json()).error ?? {}; } catch { /* no JSON */ }
  const retry = response.headers.get("Retry-After");
  const message = error.message ?? `The server answered ${response.status}.`;
  return new ApiError(retry ? `${message} (try again in ${retry} s)` : message, response.status, error.code);
}

// The events of a stream, as objects; ends with [DONE] or with the connection. An event with `error` is thrown.
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      let piece;
      try { piece = await reader.read(); } catch (fault) {
        if (fault.name === "AbortError") throw fault;
        throw new ApiError("The connection broke off.", 0, "broken");
      }
      if (piece.done) return;
      const parts = (rest + piece.value).split("\n\n");
      rest = parts.pop();
      for (const part of parts) {
        const data = part.split("\n").filter((line) => line.startsWith("data: ")).map((line) => line.slice(6)).join("\n");
        if (!data) continue;
        if (data === "[DONE]") return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, 500, event.error.code);
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
