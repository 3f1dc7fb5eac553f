// Left side: examples, upload, the query patch, the prediction.
import { ask, pictureAddress, upload } from "./api.js";
import { byId, element, percent } from "./dom.js";
import { offOf } from "./maps_view.js";
import { asksWithToken, choosePlace, queryPlace, set, state } from "./state.js";

let lastFile = null;

export function makeExamples(examples) {
  byId("examples").replaceChildren(...examples.map((one) => thumbnail(one, `example ${one.label}`)));
  if (state.image.startsWith("upload-")) addUpload({ image: state.image, frames: 1 }); // the page was loaded again
}

function thumbnail({ image, label, frames }, name) {
  const clip = frames > 1;
  const input = element("input", { type: "radio", name: "example", value: image, "aria-label": `${name}${clip ? ", a clip" : ""}`, onchange: () => set({ image }) });
  const thumb = element("img", { src: pictureAddress(image, null, Math.floor(frames / 2), 96), alt: "", loading: "lazy", class: "pixels", title: label });
  return element("label", { class: clip ? "clip" : null }, input, thumb);
}

/** An upload stands beside the examples, the last one first. */
function addUpload({ image, frames }) {
  const made = thumbnail({ image, frames, label: "your upload" }, "your upload");
  made.querySelector("img").onerror = () => made.remove(); // the server has let go of it
  byId("examples").prepend(made);
}

export function makeUpload(limits, say, complain, seesClips) {
  const send = async (file) => {
    if (!file) return;
    if (file.size > limits.upload_bytes) {
      complain(`${file.name} has ${(file.size / 2 ** 20).toFixed(1)} MiB; at most ${(limits.upload_bytes / 2 ** 20).toFixed(0)} MiB are taken`);
      return;
    }
    try {
      say(`Sending ${file.name} …`);
      const taken = await upload(file, byId("invert").checked);
      lastFile = file;
      complain("");
      addUpload(taken);
      set({ image: taken.image });
      say(`Showing ${file.name}${aboutClip(taken.frames, seesClips())}`);
    } catch (error) {
      complain(`${file.name}: ${error.message}`);
      say("");
    }
  };
  byId("file").onchange = async (event) => {
    await send(event.target.files[0]);
    event.target.value = "";
  };
  byId("invert").onchange = () => state.image.startsWith("upload-") && send(lastFile);
  const drop = byId("drop");
  drop.ondragover = (event) => { event.preventDefault(); drop.classList.add("over"); };
  drop.ondragleave = () => drop.classList.remove("over");
  drop.ondrop = (event) => { event.preventDefault(); drop.classList.remove("over"); send(event.dataTransfer.files[0]); };
  return () => {
    if (lastFile) send(lastFile);
    return lastFile !== null;
  };
}

function aboutClip(frames, { some, all }) {
  if (frames > 1 && !all) return some ? `: ${frames} frames; models of pictures see the first` : ": its first frame, as these models see pictures";
  if (frames > 1) return `: ${frames} frames, spread evenly`;
  return some ? "; it stands still, so every frame is the same" : "";
}

/** The picture under a grid of patches; arrow keys move the query. */
export function showBoard(model) {
  const [rows, cols] = model.grid;
  const picture = byId("picture");
  const { time, row, col } = queryPlace(model);
  const address = pictureAddress(state.image, model.name, time);
  showFilm(model, time);
  if (picture.getAttribute("src") !== address) picture.src = address;
  picture.classList.toggle("pixels", model.size <= 64);
  const cells = byId("cells");
  if (cells.dataset.grid !== `${model.name} ${rows} ${cols}`) {
    cells.dataset.grid = `${model.name} ${rows} ${cols}`;
    cells.style.gridTemplate = `repeat(${rows}, 1fr) / repeat(${cols}, 1fr)`;
    const cell = (row, col) => element("button", {
      type: "button", role: "gridcell", "aria-label": `patch in row ${row + 1}, column ${col + 1}`, "data-row": row, "data-col": col,
      onclick: () => choose(model, row, col),
    });
    cells.replaceChildren(...[...Array(rows).keys()].map((row) =>
      element("div", { role: "row" }, ...[...Array(cols).keys()].map((col) => cell(row, col)))));
    cells.onkeydown = (event) => move(event, model);
  }
  for (const one of cells.querySelectorAll("[role=gridcell]")) {
    const here = +one.dataset.row === row && +one.dataset.col === col;
    one.setAttribute("aria-selected", String(here && !asksWithToken(model)));
    one.tabIndex = here ? 0 : -1;
  }
  const token = byId("class-token");
  token.hidden = !model.prefix;
  token.setAttribute("aria-pressed", String(state.token));
  for (const input of document.querySelectorAll("#examples input")) input.checked = input.value === state.image;
}

/** The frames of a clip under the board; the chosen one holds the query. */
function showFilm(model, now) {
  const film = byId("film");
  film.hidden = model.times === 1;
  const key = `${state.image} ${model.name}`;
  if (!film.hidden && film.dataset.key !== key) {
    film.dataset.key = key;
    film.replaceChildren(...[...Array(model.times).keys()].map((time) => element("label", {},
      element("input", { type: "radio", name: "frame", value: time, "aria-label": `frame ${time + 1} of ${model.times}`, onchange: () => set({ t: (time + 0.5) / model.times, token: false }) }),
      element("img", { src: pictureAddress(state.image, model.name, time), alt: "", class: model.size <= 64 ? "pixels" : null }),
      element("small", { "aria-hidden": "true" }, `${time + 1}`))));
  }
  for (const input of film.querySelectorAll("input")) input.checked = +input.value === now;
}

const choose = (model, row, col) => choosePlace(model, { ...queryPlace(model), row, col });

function move(event, model) {
  const [rows, cols] = model.grid;
  const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
  const from = event.target.dataset;
  let row = +from.row, col = +from.col;
  if (event.key in steps) [row, col] = [row + steps[event.key][0], col + steps[event.key][1]];
  else if (event.key === "Home") col = 0;
  else if (event.key === "End") col = cols - 1;
  else return;
  event.preventDefault();
  row = Math.min(Math.max(row, 0), rows - 1);
  col = Math.min(Math.max(col, 0), cols - 1);
  choose(model, row, col);
  document.querySelector(`#cells [data-row="${row}"][data-col="${col}"]`).focus();
}

/** The most probable classes of every chosen model, with all heads and without those switched off. */
export async function predictionsOf(models) {
  const answers = await Promise.all(models.map((model) => ask("prediction", { model: model.name, image: state.image, off: offOf(model) })));
  return models.map((model, i) => {
    const off = (state.off[model.name] ?? []).length;
    if (!model.classes) return element("div", { class: "prediction", "data-model": model.name }, element("h3", {}, model.name), element("p", { class: "hint" }, "no classifier, no prediction"));
    const rows = answers[i].choices.slice(0, 3).map((choice) => bar(choice, off));
    const short = answers[i].choices.every((choice) => choice.name.length < 3);
    const note = off ? `${off} off, changed by ${answers[i].divergence.toFixed(2)}` : "";
    return element("div", { class: `prediction${short ? " short" : ""}${off ? " changed" : ""}`, "data-model": model.name },
      element("h3", {}, model.name, element("span", {}, note)), element("ol", {}, ...rows));
  });
}

function bar(choice, off) {
  const before = element("i", { class: off ? null : "only" });
  before.style.width = percent(choice.before).replace(" ", "");
  const after = off ? element("i") : null;
  if (after) after.style.width = percent(choice.after).replace(" ", "");
  if (after) before.style.bottom = "50%";
  const text = off ? `${percent(choice.before, 0)} → ${percent(choice.after, 0)}` : percent(choice.before);
  return element("li", {}, element("span", { title: choice.name }, choice.name), element("span", { class: "bars", "aria-hidden": "true" }, before, after), element("span", {}, text));
}
