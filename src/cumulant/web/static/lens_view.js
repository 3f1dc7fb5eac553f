// Lens: one layer's own queries and keys, weighed by each order of the expansion and by softmax, at any temperature.
import { ask } from "./api.js";
import { element, number } from "./dom.js";
import { drawMap, largest, shownWeights } from "./draw.js";
import { fact, pictureOf } from "./compare_view.js";
import { offOf } from "./maps_view.js";
import { queryCell, queryToken, state } from "./state.js";

/** Slider steps to factors: -20 is 0.1, 0 is 1, 20 is 10. */
export const temperatureOf = (step) => 10 ** (step / 20);

export async function lensView(models) {
  const able = models.filter((model) => model.lens);
  const answers = await Promise.all(able.map((model) => ask("lens", {
    model: model.name, image: state.image, query: queryToken(model), off: offOf(model),
    layer: Math.min(state.layer, model.layers - 1), temperature: temperatureOf(state.temperature),
  })));
  const sections = able.map((model, i) => section(model, answers[i]));
  const about = element("p", {}, "The same queries and keys of one trained head, under every order of the expansion. " +
    "Lower the temperature and all orders meet softmax; raise it and they part. Off by: the share of the mass that lies elsewhere than softmax puts it.");
  const missing = able.length < models.length ? element("p", {}, `Not shown: ${models.filter((m) => !m.lens).map((m) => m.name).join(", ")}`) : null;
  return { node: element("div", {}, element("div", { class: "toolbar" }, about), ...sections, missing), data: answers };
}

function section(model, answer) {
  const head = Math.min(state.head, model.heads - 1);
  const rows = answer.maps.map((map) => map.weights[head]);
  const shown = rows.map((row) => shownWeights(row, model.prefix, state.sign));
  const tops = shown.map(largest);
  const figures = answer.maps.map((map, i) => {
    const canvas = element("canvas", { role: "img", "aria-label": `${map.title} of ${model.name}: ${number(map.distance[head])} away from softmax` });
    drawMap(canvas, {
      weights: shown[i], grid: model.grid, top: Math.max(...tops), threshold: state.threshold / 100,
      query: state.token ? null : queryCell(model), side: 200, picture: pictureOf(model), behind: state.behind / 100,
    });
    const negative = rows[i].reduce((sum, w) => sum + Math.max(-w, 0), 0);
    return element("figure", { class: "figure" }, element("h3", {}, map.title), canvas,
      element("dl", { class: "facts" }, ...fact("off by", number(map.distance[head])), ...fact("negative", number(negative))));
  });
  const heading = element("div", { class: "panel-title" }, element("h3", {}, `keys and queries of the ${model.name} model`),
    element("span", {}, `layer ${answer.layer + 1}, head ${head + 1}: logits spread ${number(answer.logit_size[head])}`));
  return element("section", { class: "card lens", "aria-label": `Lens on ${model.name}` }, heading, element("div", { class: "row" }, ...figures));
}
