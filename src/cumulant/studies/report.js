"use strict";

function css(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }

function escaped(text) {
  return String(text).replace(/[&<>"']/g, c => `&#${c.charCodeAt(0)};`);
}

const shown = { layer: 0, head: -1, scale: "row", frame: 0, confusion: page.attention[0] };

function drawFigures() {
  const narrow = window.innerWidth < 700;
  for (const [id, figure] of Object.entries(page.figures)) {
    const layout = structuredClone(figure.layout);
    layout.paper_bgcolor = layout.plot_bgcolor = "rgba(0,0,0,0)";
    layout.font = { family: getComputedStyle(document.body).fontFamily, color: css("--ink"), size: narrow ? 12 : 13 };
    layout.dragmode = false;  // a finger scrolls the page, and a tap shows what a pointer does
    layout.hoverlabel = { bgcolor: css("--paper"), bordercolor: css("--line"), font: { color: css("--ink") } };
    for (const axis of [layout.xaxis, layout.yaxis]) {
      axis.gridcolor = axis.gridcolor || css("--line");
      axis.linecolor = axis.tickcolor = css("--line");
      axis.fixedrange = true;
    }
    if (narrow && id === "confusion") layout.height = Math.min(layout.height, window.innerWidth);  // it is square
    if (layout.legend) layout.legend.font = { size: narrow ? 11 : 12.5 };
    const entries = figure.data.filter(trace => trace.type === "scatter" && trace.name && trace.showlegend !== false).length;
    const abreast = Math.max(1, Math.floor(document.getElementById(id).clientWidth / 220));
    if (entries > 6) layout.height += 24 * Math.ceil(entries / abreast);  // a long legend takes nothing from the plot
    const data = structuredClone(figure.data).filter(trace => id !== "confusion" || trace.name === shown.confusion);
    // Left to itself plotly chooses the colour of the numbers as if the cells did not let the page through.
    for (const trace of data) if (trace.type === "heatmap") trace.textfont = { color: css("--ink") };
    Plotly.react(id, data, layout, { responsive: true, displayModeBar: false });
  }
}

function buttons(id, key, choices, draw) {
  const place = document.getElementById(id);
  if (choices.length < 2) { place.remove(); return; }
  for (const [value, text] of choices) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = text;
    button.setAttribute("aria-pressed", String(shown[key] === value));
    button.addEventListener("click", () => {
      shown[key] = value;
      for (const other of place.querySelectorAll("button")) other.setAttribute("aria-pressed", String(other === button));
      draw();
    });
    place.appendChild(button);
  }
}

// Maps: weights are [item][layer][head][1 + patches]; the first is the share of the tokens that have no place.
const models = page.maps.models, mapped = page.attention.filter(name => name in models), reference = models[mapped[0]];

function weights(model, item) {
  const heads = model.scores[item][Math.min(shown.layer, model.layers.length - 1)];
  if (shown.head >= 0) return heads[Math.min(shown.head, heads.length - 1)];
  return heads[0].map((_, token) => heads.reduce((sum, head) => sum + head[token], 0) / heads.length);
}

function patches(model, item) {
  const [frames, rows, columns] = model.grid, all = weights(model, item), size = rows * columns;
  const frame = Math.min(shown.frame, frames - 1);
  return all.slice(1 + frame * size, 1 + (frame + 1) * size);
}

function figure(value) { return value.toFixed(Math.abs(value) < 0.095 ? 3 : 2); }

function mapColour(value, limit) {
  const t = Math.max(-1, Math.min(1, value / limit));
  const stops = t < 0 ? page.signs.below : page.signs.above, place = Math.abs(t) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  const [from, to] = [stops[low], stops[low + 1]].map(hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16)));
  return `rgb(${from.map((c, i) => Math.round(c + (to[i] - c) * (place - low))).join(",")})`;
}

function mark(model, query) {
  const [, rows, columns] = model.grid, x = query % columns, y = Math.floor(query / columns);
  const away = model.grid[0] > 1 && shown.frame !== model.frame, unit = Math.max(rows, columns);
  const frame = (width, colour) => `<rect x="${x + 0.012 * unit}" y="${y + 0.012 * unit}" width="${1 - 0.024 * unit}"
    height="${1 - 0.024 * unit}" fill="none" stroke="${colour}" stroke-width="${unit * width}"
    ${away ? `stroke-dasharray="${0.12} ${0.12}"` : ""}/>`;
  return unit > 10 ? frame(0.012, "#fff") + frame(0.006, "#111") : frame(0.034, "#fff") + frame(0.017, "#111");
}

/** What a patch of a map weighs, in words, wherever a pointer or a finger is. */
function readWeights(place, readout) {
  const read = event => {
    const cell = event.target.closest("rect[data-weight]");
    if (cell) readout.textContent = `${cell.closest("svg").getAttribute("aria-label")}: weight ${cell.dataset.weight} here`;
  };
  place.addEventListener("pointermove", read);
  place.addEventListener("pointerdown", read);
}

function drawing(model, inside, query, label) {
  return `<svg viewBox="0 0 ${model.grid[2]} ${model.grid[1]}" role="img" aria-label="${escaped(label)}"
    shape-rendering="crispEdges"><title>${escaped(label)}</title>${inside}${mark(model, query)}</svg>`;
}

/** An image address of (height, width, 3) bytes in base 64, from a place in them on. */
function coloured(bytes64, [height, width], first) {
  const bytes = Uint8Array.from(atob(bytes64), c => c.charCodeAt(0));
  const canvas = document.createElement("canvas");
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d"), image = context.createImageData(width, height);
  for (let i = 0; i < height * width; i++) {
    for (let c = 0; c < 3; c++) image.data[4 * i + c] = bytes[first + 3 * i + c];
    image.data[4 * i + 3] = 255;
  }
  context.putImageData(image, 0, 0);
  return canvas.toDataURL();
}

const pictures = {};
function picture(number) {
  const frame = Math.min(shown.frame, reference.grid[0] - 1), key = `${number}/${frame}`, item = reference.items[number];
  pictures[key] ??= coloured(item.pixels, item.size, frame * item.size[0] * item.size[1] * 3);
  const sharp = item.size[0] < 32 ? "pixelated" : "auto";
  return `<image href="${pictures[key]}" width="${reference.grid[2]}" height="${reference.grid[1]}"
    preserveAspectRatio="none" style="image-rendering:${sharp}"/>`;
}

function drawMaps() {
  const place = document.getElementById("map-grid");
  // Many maps side by side are scrolled rather than made too small to see; few are not blown up.
  const least = window.innerWidth < 700 ? 48 : 92;
  place.style.gridTemplateColumns = `repeat(${mapped.length + 1}, minmax(${least}px, 172px))`;
  const largest = list => Math.max(1e-6, ...list.map(Math.abs));
  const numbers = reference.items.map((_, i) => i);
  const overall = largest(numbers.flatMap(i => mapped.flatMap(n => patches(models[n], i))));
  const heads = [page.noun, ...mapped].map(name => escaped(name).replaceAll("+", "<wbr>+"));
  let html = heads.map(name => `<div class="head">${name}</div>`).join("");
  for (const i of numbers) {
    const item = reference.items[i], title = page.classes[item.label];
    const row = largest(mapped.flatMap(n => patches(models[n], i)));
    html += `<div>${drawing(reference, picture(i), item.query, `${title}, the asking patch is marked`)}
      <div class="under">${escaped(title)}</div></div>`;
    for (const name of mapped) {
      const model = models[name], own = model.items[i], all = weights(model, i), values = patches(model, i);
      const limit = { all: overall, row, own: largest(values) }[shown.scale];
      const negative = all.reduce((sum, v) => sum + Math.min(v, 0), 0);
      const right = own.predicted === own.label, columns = model.grid[2];
      const cells = values.map((value, k) => `<rect x="${k % columns}" y="${Math.floor(k / columns)}" width="1.02"
        height="1.02" fill="${mapColour(value, limit)}" data-weight="${value.toFixed(4)}"/>`).join("");
      const share = (model.prefix ?? 1) ? `; class token ${all[0].toFixed(3)}` : "";  // older records do not say it
      const label = `${name}: weights of the marked patch, ${title}${share}`;
      html += `<div>${drawing(model, cells, own.query, label)}
        <div class="under">max ${figure(Math.max(...values))}<br>neg ${figure(Math.abs(negative))}<br>
        <span class="${right ? "" : "wrong"}">says ${escaped(page.classes[own.predicted])} ${right ? "✓" : "✗"}</span>
        </div></div>`;
    }
  }
  place.innerHTML = html;
  const note = { all: `one scale for all maps, ±${overall.toFixed(2)}`,
    row: "one scale per row: its largest weight is darkest", own: "each map has its own scale" }[shown.scale];
  document.getElementById("scale-low").textContent = "subtracted";
  document.getElementById("scale-high").textContent = "added";
  document.getElementById("scale-note").textContent = `(${note})`;
}

/** The layer and head whose maps subtract most, in the signed mechanisms together: there is something to see there. */
function mostNegative() {
  let best = [0, -1], most = 0;
  for (let layer = 0; layer < reference.layers.length; layer++)
    for (let head = -1; head < reference.scores[0][0].length; head++) {
      [shown.layer, shown.head] = [layer, head];
      const mass = mapped.filter(name => !name.includes("normalization=sum")).reduce((sum, name) => sum +
        reference.items.reduce((part, _, i) => part - weights(models[name], i).reduce((s, v) => s + Math.min(v, 0), 0), 0), 0);
      if (mass > most) [best, most] = [[layer, head], mass];
    }
  [shown.layer, shown.head] = best;
}

const dial = page.dial;
if (dial) {
  const model = { grid: [1, ...dial.grid], frame: 0 }, [rows, columns] = dial.grid;
  const cells = row => {
    const limit = Math.max(...row.weights.map(Math.abs));
    return row.weights.map((value, k) => `<rect x="${k % columns}" y="${Math.floor(k / columns)}" width="1.02" height="1.02"
      fill="${mapColour(Math.sign(value) * Math.sqrt(Math.abs(value) / limit), 1)}" data-weight="${value.toFixed(5)}"/>`).join("");
  };
  const place = document.getElementById("dial-grid");
  place.style.gridTemplateColumns = "repeat(auto-fill, minmax(min(46%, 200px), 1fr))";
  const view = `<image href="${coloured(dial.pixels, dial.size, 0)}" width="${columns}" height="${rows}" preserveAspectRatio="none"/>`;
  const one = (title, inside, under) => `<div><div class="head">${escaped(title)}</div>${drawing(model, inside, dial.query, title)}
    <div class="under">${under}</div></div>`;
  place.innerHTML = one("photograph", view, "the asking patch is marked") + dial.rows.map(row =>
    one(row.title, cells(row), `error ${(100 * row.error).toFixed(1)} %, work ${(100 * row.cost).toFixed(1)} %`)).join("");
}

if (reference) {
  shown.frame = reference.frame;
  mostNegative();
  readWeights(document.getElementById("map-grid"), document.getElementById("map-readout"));
  // Weights over other numbers of tokens, or larger by that number, are not seen on one scale.
  const counts = new Set(mapped.map(name => page.maps.locality[name]?.tokens));
  if (counts.size > 1 || mapped.some(name => name.includes("normalization=sum"))) shown.scale = "own";
  const heads = reference.scores[0][0].map((_, i) => [i, String(i + 1)]);
  const frames = Array.from({ length: reference.grid[0] }, (_, i) => [i, String(i + 1)]);
  buttons("layer-buttons", "layer", reference.layers.map((number, i) => [i, String(number)]), drawMaps);
  buttons("head-buttons", "head", [[-1, "mean"], ...heads], drawMaps);
  buttons("frame-buttons", "frame", frames, drawMaps);
  buttons("scale-buttons", "scale", [["row", "per row"], ["own", "per map"], ["all", "all alike"]], drawMaps);
  drawMaps();
}
if (page.attention.length) buttons("confusion-buttons", "confusion", page.attention.map(name => [name, name]), drawFigures);
drawFigures();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawFigures);
