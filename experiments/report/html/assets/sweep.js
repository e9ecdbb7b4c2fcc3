"use strict";

// Draws what is chosen on the page of a sweep: a heat map of two parameters, and the trade-off of two metrics.
const ropebridge = (() => {
  let known = null, doc = null;

  const element = (name) => document.getElementById(name);
  const chosen = (name) => Number(element(name).value);
  const model = (name) => doc.get_model_by_name(name);
  const short = (value) => (Number.isFinite(value) ? String(Number(value.toPrecision(4))) : "none");

  // Not by Math.min(...values): a browser takes some hundred thousand arguments.
  const extent = (values) => values.reduce(
    ([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);

  function median(values) {
    const sorted = Float64Array.from(values).sort(), half = sorted.length >> 1;
    return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
  }

  // A parameter, or one that is the same everywhere where none is chosen.
  const parameter = (place) =>
    known.parameters[place] ?? { name: "", labels: ["all points"], code: known.points.map(() => 0) };

  // --- heat map ---

  // The points that have the values which are kept; parameters of the map itself are free.
  function kept_points() {
    const free = [chosen("heat-x"), chosen("heat-y")];
    const kept = known.parameters.map((_, place) => (free.includes(place) ? -1 : chosen(`kept-${place}`)));
    known.parameters.forEach((_, place) => { element(`kept-${place}`).disabled = free.includes(place); });
    return known.points.map((_, point) => point).filter((point) =>
      kept.every((code, place) => code < 0 || known.parameters[place].code[point] === code));
  }

  function cells(x, y, metric) {
    const found = new Map();
    for (const point of kept_points()) {
      const value = metric.values[point];
      if (value === null) continue;
      const key = `${x.code[point]} ${y.code[point]}`;
      if (!found.has(key)) found.set(key, { x: x.code[point], y: y.code[point], values: [] });
      found.get(key).values.push(value);
    }
    return [...found.values()].map((cell) => ({ ...cell, median: median(cell.values) }));
  }

  function draw_heat() {
    const [x, y] = [parameter(chosen("heat-x")), parameter(chosen("heat-y"))];
    const metric = known.metrics[chosen("heat-metric")];
    const shown = cells(x, y, metric);
    const medians = shown.map((cell) => cell.median);
    const [low, high] = extent(medians);
    const best = metric.more_is_better ? high : low;
    const figure = model("heat");
    figure.x_range.factors = x.labels;
    figure.y_range.factors = [...y.labels].reverse();
    figure.below[0].axis_label = x.name;
    figure.left[0].axis_label = y.name;
    model("heat-colours").setv(high > low ? { low, high } : { low: low - 1, high: high + 1 });
    model("heat-bar").title = `median of ${metric.label}`;
    const roomy = figure.inner_width / x.labels.length > 44;
    const columns = (list) => ({
      x: list.map((cell) => x.labels[cell.x]),
      y: list.map((cell) => y.labels[cell.y]),
      value: list.map((cell) => cell.median),
      text: list.map((cell) => (roomy ? short(cell.median) : "")),
      // The colours are dark at the low end.
      text_colour: list.map((cell) => ((cell.median - low) / (high - low || 1) < 0.55 ? "white" : "black")),
      points: list.map((cell) => cell.values.length),
      span: list.map((cell) => extent(cell.values).map(short).join(" to ")),
    });
    model("heat-cells").data = columns(shown);
    model("heat-best").data = columns(shown.filter((cell) => cell.median === best));
  }

  // --- trade-off ---

  // The places of the points on the front, from the best in the first metric to the best in the second.
  function front(first, second) {
    const worth = (metric, point) => (metric.more_is_better ? 1 : -1) * metric.values[point];
    const order = known.points.map((_, point) => point)
      .filter((point) => first.values[point] !== null && second.values[point] !== null)
      .sort((a, b) => worth(first, b) - worth(first, a) || worth(second, b) - worth(second, a));
    const found = [];
    for (const point of order) {
      const last = found.at(-1);
      const better = last === undefined || worth(second, point) > worth(second, last);
      const alike = last !== undefined && worth(second, point) === worth(second, last)
        && worth(first, point) === worth(first, last);
      if (better || alike) found.push(point);
    }
    return found;
  }

  function draw_front() {
    const [first, second] = [known.metrics[chosen("front-x")], known.metrics[chosen("front-y")]];
    const by = parameter(chosen("front-colour")), few = by.labels.length <= known.colours.length;
    const colour_of = (point) => (few ? known.colours[by.code[point]] : known.plain);
    const both = known.points.map((_, point) => point)
      .filter((point) => first.values[point] !== null && second.values[point] !== null);
    const values = (point) =>
      known.parameters.map(({ name, texts }) => `${name}: ${texts[point]}`).join("\n");
    model("front-points").data = {
      x: both.map((point) => first.values[point]),
      y: both.map((point) => second.values[point]),
      colour: both.map(colour_of),
      point: both.map((point) => known.points[point]),
      values: both.map(values),
    };
    const best = front(first, second);
    model("front-line").data = {
      x: best.map((point) => first.values[point]),
      y: best.map((point) => second.values[point]),
      colour: best.map(colour_of),
    };
    const figure = model("front");
    fit(figure.x_range, both.map((point) => first.values[point]));
    fit(figure.y_range, both.map((point) => second.values[point]));
    figure.below[0].axis_label = `${first.label}, ${first.more_is_better ? "more" : "less"} is better`;
    figure.left[0].axis_label = `${second.label}, ${second.more_is_better ? "more" : "less"} is better`;
    write_legend(few ? by : null);
    write_best(best, [first, second]);
  }

  function fit(range, values) {
    const [low, high] = extent(values);
    const room = 0.05 * (high - low) || 1;
    const wanted = { start: low - room, end: high + room };
    range.setv({ ...wanted, reset_start: wanted.start, reset_end: wanted.end });
  }

  function write_legend(by) {
    element("colours").replaceChildren(...(by === null ? [] : by.labels.map((label, code) => {
      const mark = Object.assign(document.createElement("span"), { className: "mark" });
      mark.style.background = known.colours[code];
      const entry = document.createElement("span");
      entry.append(mark, by.name ? `${by.name} ${label}` : label);
      return entry;
    })));
  }

  function write_best(best, metrics) {
    const row = (kind, texts) => {
      const made = document.createElement("tr");
      made.append(...texts.map((text) => Object.assign(document.createElement(kind), { textContent: text })));
      return made;
    };
    const { parameters, points } = known;
    const heads = ["point", ...parameters.map(({ name }) => name), ...metrics.map(({ label }) => label)];
    element("best").tHead.replaceChildren(row("th", heads));
    element("best").tBodies[0].replaceChildren(...best.slice(0, 200).map((point) => row("td", [
      points[point], ...parameters.map(({ texts }) => texts[point]), ...metrics.map(({ values }) => short(values[point])),
    ])));
  }

  // --- beginning ---

  function begin() {
    known = JSON.parse(element("known").textContent);
    doc = Bokeh.documents[0];
    for (const select of document.querySelectorAll("#heat select")) select.addEventListener("change", draw_heat);
    for (const select of document.querySelectorAll("#front select")) select.addEventListener("change", draw_front);
    model("heat").properties.inner_width.change.connect(draw_heat);
    draw_heat();
    draw_front();
    document.documentElement.dataset.ready = "true";
  }

  document.addEventListener("DOMContentLoaded", function wait() {
    if (window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle) begin();
    else setTimeout(wait, 20);
  });

  return { front };
})();
