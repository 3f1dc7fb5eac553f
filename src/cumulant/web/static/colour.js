// A diverging scale centred on zero that colour-blind people can read: blue subtracts, orange takes, white is nothing.

const NEGATIVE = ["#f7f7f7", "#d1e5f0", "#67a9cf", "#2166ac", "#053061"];
const POSITIVE = ["#f7f7f7", "#fee0b6", "#fdb863", "#e08214", "#7f3b08"];
const SEQUENTIAL = ["#f7f7f7", "#dadaeb", "#9e9ac8", "#6a51a3", "#3f007d"];

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
