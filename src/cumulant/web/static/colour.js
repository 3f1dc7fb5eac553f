// The palettes of cumulant.style, which a test compares with these. Signs: blue subtracts, red takes, white is nothing.

const NEGATIVE = ["#f7f7f7", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac", "#053061"];
const POSITIVE = ["#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"];
const SEQUENTIAL = ["#f7f7f7", "#dadaeb", "#9e9ac8", "#6a51a3", "#3f007d"];
export const MECHANISMS = {
  softmax: "#b5459b", linear: "#d9920f", cumulant2: "#1faa7a", cumulant3: "#3c6fe0", cumulant1: "#8a7f3c",
  cosformer: "#c0558f", flow: "#6b8e23", focused_linear: "#a0522d", rala: "#d4526e", mala: "#c868c0", agent: "#159fb0",
  combiner: "#7a7a3a", aaren: "#7f7f7f", lla: "#c23b22", hierarchical: "#4a6fa4", cluster4: "#58ad8b",
  cluster16: "#2f9e6e", cluster64: "#127d5c",
};
export const SPARE = [
  "#c0558f", "#6b8e23", "#a0522d", "#4a90a4", "#d4526e", "#7a7a3a", "#3f7f6f", "#9467bd", "#b08d2d", "#5b7fa6",
];

const bytes = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
const parsed = (stops) => stops.map(bytes);
const scales = { negative: parsed(NEGATIVE), positive: parsed(POSITIVE), sequential: parsed(SEQUENTIAL) };

function along(stops, share) {
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((c, i) => Math.round(c + (stops[low + 1][i] - c) * (place - low)));
}

/** RGB of a number from -1 to 1. */
export const diverging = (t) => along(t < 0 ? scales.negative : scales.positive, Math.abs(t));

/** RGB of a number from 0 to 1, for things that have no sign. */
export const sequential = (t) => along(scales.sequential, t);

/** Black or white, whichever can be read on that colour (WCAG relative luminance). */
export function inkOn([r, g, b]) {
  const [R, G, B] = [r, g, b].map((c) => (c / 255 <= 0.04045 ? c / 255 / 12.92 : ((c / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * R + 0.7152 * G + 0.0722 * B > 0.179 ? "#000" : "#fff";
}

export const css = ([r, g, b]) => `rgb(${r} ${g} ${b})`;
