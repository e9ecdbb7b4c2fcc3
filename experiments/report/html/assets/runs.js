"use strict";

// What the page does beside what Bokeh does: hands over the bars that lie in a window, numbers them, keeps the windows
// of several runs together, goes to steps.
const ropebridge = (() => {
  let runs = [], kinds = [], doc = null;

  const number = (value) => Number(value.toPrecision(4));

  const seconds = (value) => {
    const [unit, scale] = Math.abs(value) >= 1 ? ["s", 1] : Math.abs(value) >= 1e-3 ? ["ms", 1e3] : ["µs", 1e6];
    return `${number(value * scale)} ${unit}`;
  };

  const bytes = (value) => {
    const power = Math.min(4, Math.max(0, Math.floor(Math.log10(value) / 3)));
    return `${number(value / 1000 ** power)} ${["B", "kB", "MB", "GB", "TB"][power]}`;
  };

  // What a bar is; 2F0 is stage, action and microbatch.
  function describe_bar(index, bar) {
    const run = runs[index], { bars } = run, kind = kinds[bars.kind[bar]];
    const [stage, microbatch, peer] = [bars.stage[bar], bars.microbatch[bar], run.peers[bars.peer[bar]]];
    const name = microbatch >= 0 ? `${stage}${run.actions[bars.action[bar]]}${microbatch}` : "";
    if (kind.computes) return name ? `${kind.label} ${name}: stage ${stage}, microbatch ${microbatch}` : kind.label;
    if (kind.waits) return `waiting for ${name ? `the input of ${name}` : "gradients"}, from ${peer}`;
    const size = run.sizes_bytes[bars.size[bar]];
    const how_much = size > 0 ? `, ${bytes(size)}` : "";
    if (kind.sends) return `sends ${name ? `what ${name} made` : "layers or gradients"} to ${peer}${how_much}`;
    return `${kind.label}${peer ? `, with ${peer}` : ""}${how_much}`;
  }

  const describe_time = (index, bar) => {
    const start = runs[index].bars.start_s[bar], duration = runs[index].bars.duration_s[bar];
    return `${seconds(duration)}, from ${start.toFixed(6)} s to ${(start + duration).toFixed(6)} s`;
  };

  // --- which bars are drawn ---

  // Hand over the bars in the window. Those narrower than a pixel are drawn as wide as one, and of several of a kind
  // in the same pixel only the first. Later kinds are drawn over earlier ones.
  function hand_over_bars(run) {
    const { bars, range, gantt } = run, { start, end } = range;
    const pixel_s = (end - start) / Math.max(1, gantt.inner_width);
    const by_kind = kinds.map(() => []);
    const last_pixel = new Int32Array(run.rows * kinds.length).fill(-1);
    for (let bar = 0; bar < bars.kind.length && bars.start_s[bar] < end; bar += 1) {
      const begin = bars.start_s[bar], duration = bars.duration_s[bar], kind = bars.kind[bar];
      if (begin + duration < start) continue;
      if (duration < pixel_s) {
        const lane = bars.row[bar] * kinds.length + kind, pixel = Math.floor((begin - start) / pixel_s);
        if (last_pixel[lane] === pixel) continue;
        last_pixel[lane] = pixel;
      }
      by_kind[kind].push(bar);
    }
    run.of_kinds = by_kind;
    run.drawn.data = columns_of(run, by_kind.flat(), pixel_s);
  }

  function columns_of({ bars }, shown, pixel_s) {
    const own_kind = (bar) => kinds[bars.kind[bar]];
    return {
      bar: Int32Array.from(shown),
      y: Float32Array.from(shown, (bar) => bars.row[bar] + own_kind(bar).offset),
      height: Float32Array.from(shown, (bar) => own_kind(bar).height),
      colour: Uint32Array.from(shown, (bar) => own_kind(bar).colour),
      left_s: Float64Array.from(shown, (bar) => bars.start_s[bar]),
      right_s: Float64Array.from(shown, (bar) => bars.start_s[bar] + Math.max(bars.duration_s[bar], pixel_s)),
      row: Int32Array.from(shown, (bar) => bars.row[bar]),
      step: Int32Array.from(shown, (bar) => bars.step[bar]),
    };
  }

  // Write microbatches into the bars of work that are wide enough for them.
  function number_bars({ bars, range, gantt, numbers, rows, of_kinds }) {
    const found = { x: [], y: [], text: [], colour: [] };
    const { start, end } = range;
    const pixels_per_s = gantt.inner_width / (end - start);
    const tall = gantt.inner_height / rows >= 14;
    const shown = tall ? of_kinds.filter((_, kind) => kinds[kind].computes).flat() : [];
    for (const bar of shown) {
      const [begin, duration, text] = [bars.start_s[bar], bars.duration_s[bar], String(bars.microbatch[bar])];
      if (begin + duration < start || begin > end || bars.microbatch[bar] < 0) continue;
      if (duration * pixels_per_s < 6.5 * text.length + 3) continue;
      const kind = kinds[bars.kind[bar]];
      found.x.push(begin + duration / 2);
      found.y.push(bars.row[bar] + kind.offset);
      found.text.push(text);
      found.colour.push(kind.text_colour);
    }
    numbers.data = found;
  }

  let scheduled = false;
  function draw_soon() {
    if (scheduled) return;
    scheduled = true;
    requestAnimationFrame(() => {
      scheduled = false;
      draw();
    });
  }

  function draw() {
    for (const run of runs) {
      hand_over_bars(run);
      number_bars(run);
    }
  }

  // --- windows ---

  // The time in another run at which it was as far as this run is now: steps are aligned, whatever they took.
  function same_progress(time, from, to) {
    const first = Math.max(from.first_step, to.first_step);
    const last = Math.min(from.first_step + from.starts_s.length, to.first_step + to.starts_s.length) - 1;
    if (first > last) return to.starts_s[0] + (time - from.starts_s[0]);
    const of = (run, step) => run.starts_s[step - run.first_step];
    let step = first;
    while (step < last && of(from, step + 1) <= time) step += 1;
    const into = time - of(from, step);
    if (step === last || into < 0) return of(to, step) + into;
    const stretch = (of(to, step + 1) - of(to, step)) / (of(from, step + 1) - of(from, step));
    return of(to, step) + into * stretch;
  }

  let following = false;
  function follow(leader) {
    if (following) return;
    following = true;
    const { start, end } = leader.range;
    for (const run of runs) {
      if (run === leader) continue;
      const begin = same_progress(start, leader, run);
      run.range.setv({ start: begin, end: begin + (end - start) });
    }
    following = false;
    draw_soon();
  }

  const longest_s = () => Math.max(...runs.map((run) => run.end_s)) * 1.002;

  function show(run, start, end) {
    const width = Math.min(end - start, longest_s());
    const begin = Math.max(0, Math.min(start, longest_s() - width));
    run.range.setv({ start: begin, end: begin + width });
  }

  // Show so many steps of a run, from this one (counted from the run's first) on, with a little room around.
  function show_steps(run, first, count) {
    const of = (step) => (step < run.starts_s.length ? run.starts_s[Math.max(0, step)] : run.end_s);
    const [start, end] = [of(first), of(first + count)];
    show(run, start - 0.02 * (end - start), end + 0.02 * (end - start));
  }

  function steps_in_view({ starts_s, range }) {
    const room = 0.03 * (range.end - range.start);
    let first = 0;
    while (first + 1 < starts_s.length && starts_s[first + 1] <= range.start + room) first += 1;
    let end = first + 1;
    while (end < starts_s.length && starts_s[end] < range.end - room) end += 1;
    return { first, count: end - first };
  }

  function move(steps) {
    const { first, count } = steps_in_view(runs[0]);
    show_steps(runs[0], Math.max(0, Math.min(runs[0].starts_s.length - count, first + steps)), count);
  }

  function zoom(factor) {
    const { start, end } = runs[0].range;
    const [middle, half] = [(start + end) / 2, ((end - start) * factor) / 2];
    show(runs[0], middle - half, middle + half);
  }

  const buttons = {
    earlier: () => move(-1),
    later: () => move(1),
    closer: () => zoom(0.5),
    farther: () => zoom(2),
    step: () => show_steps(runs[0], steps_in_view(runs[0]).first, 1),
    everything: () => show(runs[0], 0, longest_s()),
  };

  // --- beginning ---

  function listen() {
    for (const button of document.querySelectorAll("button[data-does]")) {
      button.addEventListener("click", () => buttons[button.dataset.does]());
    }
    for (const row of document.querySelectorAll("tr[data-step]")) {
      row.addEventListener("click", () => {
        show_steps(runs[Number(row.dataset.run)], Number(row.dataset.step) - 1, 2);
        document.getElementById("pipeline").scrollIntoView({ behavior: "smooth" });
      });
    }
    for (const run of runs) {
      run.range.change.connect(() => follow(run));
      const { selected } = run.steps;
      selected.properties.indices.change.connect(() => {
        if (selected.indices.length === 0) return;
        show_steps(run, selected.indices[0], 1);
        selected.indices = [];
      });
      run.gantt.properties.inner_width.change.connect(draw_soon);
    }
  }

  function begin() {
    ({ runs, kinds } = JSON.parse(document.getElementById("known").textContent));
    doc = Bokeh.documents[0];
    runs.forEach((run, index) => {
      const named = (name) => doc.get_model_by_name(`${name}-${index}`);
      const bars = named("bars").data;
      const found = { gantt: named("gantt"), drawn: named("drawn"), numbers: named("numbers"), steps: named("steps") };
      Object.assign(run, { ...found, bars, range: named("window"), of_kinds: [] });
    });
    listen();
    follow(runs[0]);
    draw();
    document.documentElement.dataset.ready = "true";
  }

  // Bokeh puts its figures into the page when the page is there.
  document.addEventListener("DOMContentLoaded", function wait() {
    if (window.Bokeh && Bokeh.documents.length > 0 && Bokeh.documents[0].is_idle) begin();
    else setTimeout(wait, 20);
  });

  return { describe_bar, describe_time };
})();
