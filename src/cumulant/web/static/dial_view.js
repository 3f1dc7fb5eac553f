// Dial: a whole model with its attention between linear and softmax, nothing trained: what it answers, cost and time.
import { ask } from "./api.js";
import { byId, element, percent } from "./dom.js";
import { fact } from "./compare_view.js";
import { set, state } from "./state.js";

let dials = [];
export const haveDials = (there) => { dials = there; };
export const chosenDial = () => dials.find((one) => one.name === state.dial) ?? dials[0];

const question = (dial, step) => ({ dial: dial.name, image: state.image, step, ...(dial.pointed ? { x: state.x, y: state.y } : {}) });
const score = (dial, value) => (dial.same ? value.toFixed(3) : percent(value));
const seconds = (value) => (value < 1 ? `${(1000 * value).toFixed(0)} ms` : `${value.toFixed(1)} s`);
const costOf = (step) => percent(step.cost, step.cost < 0.1 ? 1 : 0);

export async function dialView(_, wanted) {
  const dial = chosenDial();
  const last = dial.steps.length - 1, at = Math.min(state.step, last);
  byId("status").textContent = "The first look at a picture takes a pass of the model for each step …";
  const exact = await ask("dial", question(dial, last));
  if (!wanted()) return { node: element("div"), data: [] };
  const now = at === last ? exact : await ask("dial", question(dial, at));
  byId("status").textContent = "";
  const strip = element("div", { class: "dial-strip", role: "group", "aria-label": "Steps of the dial, from linear to softmax" },
    ...dial.steps.map((step, i) => stop(dial, step, i, i === at)));
  const show = (answer) => strip.children[answer.step].replaceWith(stop(dial, dial.steps[answer.step], answer.step, answer.step === at, answer));
  [exact, now].forEach(show);
  const node = element("div", {}, toolbar(dial, at), element("div", { class: "dial-pair" },
    figure(dial, "what the model is given", exact.before, []),
    figure(dial, `attention: ${dial.steps[at].title}`, now.picture, facts(dial, at, now, exact), "now"),
    figure(dial, "attention: softmax", exact.picture, facts(dial, last, exact, exact))), strip);
  fill(dial, show, wanted);
  return { node, data: [{ dial: dial.name, step: dial.steps[at].title, cost: dial.steps[at].cost, seconds: now.seconds, softmax_seconds: exact.seconds, [dial.score]: now.score }] };
}

/** The other steps, one after the other, as long as somebody looks. */
async function fill(dial, show, wanted) {
  for (let step = 0; step < dial.steps.length; step++) {
    if (!wanted()) return;
    await ask("dial", question(dial, step)).then(show, () => {});
  }
}

function toolbar(dial, at) {
  const last = dial.steps.length - 1;
  const select = element("select", { id: "dial", onchange: () => set({ dial: select.value }) },
    ...dials.map((one) => element("option", { value: one.name, selected: one === dial }, one.name)));
  const slider = element("input", { type: "range", id: "step", min: 0, max: last, step: 1, value: at, oninput: () => set({ step: +slider.value }) });
  slider.setAttribute("aria-valuetext", dial.steps[at].title);
  return element("div", { class: "toolbar dial-bar" }, element("label", {}, "Model", select),
    element("label", { class: "dial-slider" }, element("span", {}, "linear", element("b", {}, dial.steps[at].title), "softmax"), slider),
    element("p", {}, `${dial.title}. Its weights stay as they are; only the attention changes.${dial.pointed ? " Click a picture." : ""}`));
}

function facts(dial, step, answer, exact) {
  return [["multiply-adds", costOf(dial.steps[step])], ["time in these layers", seconds(answer.seconds)], ["of softmax's time", percent(answer.seconds / exact.seconds, answer.seconds < exact.seconds / 10 ? 1 : 0)], [dial.score, score(dial, answer.score)]];
}

function figure(dial, title, source, facts, kind = "") {
  const picture = element("img", { src: source, alt: title });
  const board = element("div", { class: "dial-board" }, picture);
  if (dial.pointed) {
    const mark = element("i", { class: "dial-mark", "aria-hidden": "true" });
    Object.assign(mark.style, { left: percent(state.x, 2).replace(" ", ""), top: percent(state.y, 2).replace(" ", "") });
    board.append(mark);
    board.onclick = (event) => {
      const box = picture.getBoundingClientRect();
      const share = (value) => Math.min(Math.max(value, 0), 1);
      set({ token: false, x: share((event.clientX - box.left) / box.width), y: share((event.clientY - box.top) / box.height) });
    };
    board.style.cursor = "crosshair";
  }
  return element("figure", { class: `card figure ${kind}` }, element("h3", {}, title), board,
    facts.length ? element("dl", { class: "facts" }, ...facts.flatMap(([name, value]) => fact(name, value))) : null);
}

function stop(dial, step, i, here, answer) {
  const text = answer ? `${dial.score} ${score(dial, answer.score)}, ${seconds(answer.seconds)}` : "not asked yet";
  return element("button", { type: "button", "aria-pressed": String(here), "data-step": i, "aria-label": `${step.title}: ${costOf(step)} of softmax's multiply-adds, ${text}`, onclick: () => set({ step: i }) },
    answer ? element("img", { src: answer.picture, alt: "" }) : element("span", { class: "empty" }, "…"),
    element("b", {}, step.title), element("small", {}, `cost ${costOf(step)}`), element("small", {}, answer ? `${dial.short} ${score(dial, answer.score)}` : ""));
}
