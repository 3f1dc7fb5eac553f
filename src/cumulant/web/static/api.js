// Talking to the server. Answers are remembered: going back to a patch costs nothing.

const remembered = new Map();
const LIMIT = 400;

export class Refused extends Error {
  constructor(status, kind, message) {
    super(message);
    this.status = status;
    this.kind = kind;
  }
}

async function read(response) {
  const content = await response.json().catch(() => ({}));
  if (!response.ok) throw new Refused(response.status, content.error, content.message ?? `the server answered ${response.status}`);
  return content;
}

export const info = () => fetch("/api/info").then(read);

/** Ask a question; the same question is asked once. */
export function ask(what, question) {
  const key = `${what} ${JSON.stringify(question)}`;
  if (!remembered.has(key)) {
    const answer = fetch(`/api/${what}`, {
      method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(question),
    }).then(read);
    answer.catch(() => remembered.delete(key));
    remembered.set(key, answer);
    if (remembered.size > LIMIT) remembered.delete(remembered.keys().next().value);
  }
  return remembered.get(key);
}

export const upload = (file, invert) =>
  fetch(`/api/images?invert=${invert}`, {
    method: "POST", headers: { "content-type": "application/octet-stream" }, body: file,
  }).then(read);

export const pictureAddress = (image, model, time = 0, side = 0) =>
  `/api/images/${encodeURIComponent(image)}?time=${time}${model ? `&model=${encodeURIComponent(model)}` : ""}${side ? `&side=${side}` : ""}`;
