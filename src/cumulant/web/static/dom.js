// Small helpers for making elements.

/** element("button", { type: "button", onclick }, "text", child, ...); keys with - and "class" become attributes. */
export function element(tag, options = {}, ...children) {
  const made = document.createElement(tag);
  for (const [key, value] of Object.entries(options)) {
    if (value === undefined || value === null) continue;
    if (key === "class" || key === "role" || key.includes("-")) made.setAttribute(key, value);
    else made[key] = value;
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

export const byId = (id) => document.getElementById(id);
export const percent = (share, digits = 1) => `${(100 * share).toFixed(digits)} %`;
export const number = (value) => (Math.abs(value) >= 100 ? value.toFixed(0) : Math.abs(value) >= 10 ? value.toFixed(1) : value.toFixed(3)).replace(/^-(0\.0*)$/, "$1");

export function save(name, blob) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 1000);
}
