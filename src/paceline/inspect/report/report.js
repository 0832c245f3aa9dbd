"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const NS = "http://www.w3.org/2000/svg";
  const state = { axis: "step", logX: false, logY: false, smooth: 0, hidden: new Set(), zoom: {} };
  const TITLES = { step: ["step", ""], samples: ["samples", ""], time: ["training time", "s"], energy: ["energy", "J"] };
  const SPACE = { left: 58, right: 10, top: 10, bottom: 34 };

  const create = (name, attributes, text) => {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text !== undefined) element.textContent = text;
    return element;
  };
  const digits = (value) => String(Number(value.toPrecision(4)));
  const count = (value) => {
    for (const [size, unit] of [[1e12, " T"], [1e9, " G"], [1e6, " M"], [1e3, " k"]])
      if (Math.abs(value) >= size) return Number((value / size).toPrecision(4)) + unit;
    return digits(value);
  };
  const seconds = (value) => {
    const size = Math.abs(value);
    if (size === 0) return "0 s";
    if (size < 1e-3) return digits(value * 1e6) + " µs";
    if (size < 1) return digits(value * 1e3) + " ms";
    if (size < 60) return digits(value) + " s";
    const whole = Math.round(size), pad = (part) => String(part).padStart(2, "0");
    const [hours, minutes, rest] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60, whole % 60];
    return (value < 0 ? "−" : "") + (hours ? `${hours}:${pad(minutes)}:${pad(rest)}` : `${minutes}:${pad(rest)}`);
  };
  const format = (value, unit) => {
    if (unit === "s") return seconds(value);
    if (unit === "J") return count(value) + (Math.abs(value) >= 1000 ? "J" : " J");
    const text = Math.abs(value) >= 1e4 ? count(value) : digits(value);
    return unit ? `${text} ${unit}` : text;
  };

  const ticks = (low, high, isLog) => {
    const found = [];
    if (isLog) {
      const first = Math.floor(Math.log10(low)), last = Math.ceil(Math.log10(high));
      const every = Math.max(1, Math.ceil((last - first) / 6));
      for (let power = first; power <= last; power += every)
        for (const factor of last - first <= 2 ? [1, 2, 5] : [1]) {
          const value = factor * 10 ** power;
          if (value >= low && value <= high) found.push(value);
        }
      if (found.length > 1) return found;
    }
    const raw = (high - low) / 5;
    if (!(raw > 0 && Number.isFinite(raw))) return [low];
    const power = 10 ** Math.floor(Math.log10(raw));
    const size = [1, 2, 5, 10].map((factor) => factor * power).find((value) => value >= raw * 0.999);
    found.length = 0;
    for (let at = Math.ceil(low / size - 1e-9); at <= Math.floor(high / size + 1e-9); at++) found.push(at * size);
    return found;
  };

  const smoothed = (values) => {
    if (!state.smooth) return null;
    let total = 0, weight = 0;
    return values.map((value) => {
      if (value === null) return null;
      total = total * state.smooth + value * (1 - state.smooth);
      weight = weight * state.smooth + (1 - state.smooth);
      return total / weight;
    });
  };

  const group = (figure) => (figure.kind === "machine" ? "machine" : "steps");
  const axisOf = (figure) => (figure.kind === "machine" ? "time" : state.axis);

  const scale = (low, high, begin, end, isLog) => {
    const map = isLog ? Math.log10 : (value) => value;
    const half = map(high) / 2 - map(low) / 2 || 0.5; // the difference of huge values overflows
    const forward = (value) => begin + ((end - begin) * (map(value) / 2 - map(low) / 2)) / half;
    forward.back = (at) => {
      const value = 2 * (map(low) / 2 + ((at - begin) / (end - begin)) * half);
      return isLog ? 10 ** value : value;
    };
    return forward;
  };

  class Plot {
    constructor(figure, element) {
      this.figure = figure;
      this.element = element;
      this.space = element.querySelector(".plot");
      this.tip = document.createElement("div");
      this.tip.className = "tip";
      this.tip.hidden = true;
      element.append(this.tip);
    }

    lines() {
      const axis = axisOf(this.figure), isSteps = group(this.figure) === "steps";
      return this.figure.lines
        .filter((line) => !(isSteps && state.hidden.has(line.colour)))
        .map((line) => ({ ...line, x: data.axes[line.axes][axis] }))
        .filter((line) => line.x);
    }

    draw() {
      const width = Math.max(280, this.space.clientWidth), height = Math.round(Math.min(280, Math.max(200, width * 0.45)));
      const isSteps = group(this.figure) === "steps", axis = axisOf(this.figure);
      const zoom = state.zoom[group(this.figure)];
      const logX = isSteps && state.logX, logY = isSteps && state.logY;
      const lines = this.lines();
      const range = { x: [Infinity, -Infinity], y: [Infinity, -Infinity] };
      const widen = (name, value) => {
        if (value < range[name][0]) range[name][0] = value;
        if (value > range[name][1]) range[name][1] = value;
      };
      const inside = (x) => (!zoom || (x >= zoom[0] && x <= zoom[1])) && !(logX && x <= 0);
      for (const line of lines)
        line.x.forEach((x, at) => {
          if (!inside(x) || line.mean[at] === null) return;
          widen("x", x);
          for (const values of [line.low || line.mean, line.high || line.mean])
            if (!(logY && values[at] <= 0)) widen("y", values[at]);
        });
      const svg = create("svg", { class: "figure live", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": this.figure.title });
      this.space.replaceChildren(svg);
      this.svg = svg;
      if (!(range.x[0] <= range.x[1] && range.y[0] <= range.y[1])) {
        svg.append(create("text", { class: "tick", x: width / 2, y: height / 2, "text-anchor": "middle" }, "no values in this range"));
        this.x = null;
        return;
      }
      if (zoom) range.x = [Math.max(zoom[0], logX ? range.x[0] : -Infinity), zoom[1]];
      for (const name of ["x", "y"])
        if (range[name][0] === range[name][1]) {
          const half = Math.abs(range[name][0]) * 0.05 || 0.5;
          range[name] = [range[name][0] - half, range[name][1] + half];
        }
      if (!logY) {
        const margin = range.y[1] * 0.05 - range.y[0] * 0.05, most = Number.MAX_VALUE;
        range.y = [Math.max(range.y[0] - margin, -most), Math.min(range.y[1] + margin, most)];
      }
      const right = width - SPACE.right, bottom = height - SPACE.bottom;
      const x = scale(range.x[0], range.x[1], SPACE.left, right, logX);
      const y = scale(range.y[0], range.y[1], bottom, SPACE.top, logY);
      Object.assign(this, { x, y, width, height, drawn: lines, inside });
      for (const value of ticks(range.y[0], range.y[1], logY)) {
        const at = y(value);
        svg.append(create("line", { class: "gridline", x1: SPACE.left, x2: right, y1: at, y2: at }));
        const unit = ["s", "J"].includes(this.figure.unit) ? this.figure.unit : "";
        svg.append(create("text", { class: "tick", x: SPACE.left - 6, y: at + 4, "text-anchor": "end" }, format(value, unit)));
      }
      const [title, unit] = isSteps ? TITLES[axis] : ["time since the start", "s"];
      let last = -Infinity;
      for (const value of ticks(range.x[0], range.x[1], logX)) {
        if (x(value) - last < 55) continue;
        last = x(value);
        svg.append(create("text", { class: "tick", x: last, y: bottom + 15, "text-anchor": "middle" }, format(value, unit)));
      }
      svg.append(create("line", { class: "axis", x1: SPACE.left, x2: right, y1: bottom, y2: bottom }));
      svg.append(create("text", { class: "tick", x: (SPACE.left + right) / 2, y: height - 4, "text-anchor": "middle" }, title));
      for (const line of lines) this.drawLine(line, logY);
      this.cursor = create("line", { class: "cursor", y1: SPACE.top, y2: bottom, visibility: "hidden" });
      this.select = create("rect", { class: "select", y: SPACE.top, height: bottom - SPACE.top, width: 0 });
      svg.append(this.select, this.cursor);
      this.listen();
    }

    drawLine(line, logY) {
      const isShown = (value) => value !== null && !(logY && value <= 0);
      const curve = smoothed(line.mean);
      const colour = line.colour % 8;
      const draw = (values, name) => {
        let path = "", gap = true, single = [];
        line.x.forEach((x, at) => {
          if (!this.inside(x) || !isShown(values[at])) { gap = true; return; }
          const point = `${this.x(x).toFixed(1)} ${this.y(values[at]).toFixed(1)}`;
          if (gap) single.push(path.length);
          path += (gap ? "M" : "L") + point;
          gap = false;
        });
        if (single.length && !path.includes("L")) path = path.replace(/M([^M]+)/g, "M$1h0.01");
        this.svg.append(create("path", { class: `line s${colour} ${name}`, d: path, "stroke-linecap": "round" }));
      };
      if (line.low) {
        let high = [], low = [];
        const flush = () => {
          if (high.length) this.svg.append(create("polygon", { class: `band f${colour}`, points: [...high, ...low.reverse()].join(" ") }));
          high = []; low = [];
        };
        line.x.forEach((x, at) => {
          if (!this.inside(x) || !isShown(line.low[at]) || !isShown(line.high[at])) return flush();
          high.push(`${this.x(x).toFixed(1)},${this.y(line.high[at]).toFixed(1)}`);
          low.push(`${this.x(x).toFixed(1)},${this.y(line.low[at]).toFixed(1)}`);
        });
        flush();
      }
      draw(line.mean, curve ? "raw" : "");
      if (curve) draw(curve, "");
    }

    at(event) {
      const box = this.svg.getBoundingClientRect();
      return ((event.clientX - box.left) / box.width) * this.width;
    }

    listen() {
      let begin = null;
      this.svg.addEventListener("pointerdown", (event) => {
        if (event.pointerType === "mouse" && event.button === 0) { begin = this.at(event); this.svg.setPointerCapture(event.pointerId); }
      });
      this.svg.addEventListener("pointermove", (event) => {
        const at = this.at(event);
        if (begin !== null) {
          this.select.setAttribute("x", Math.min(begin, at));
          this.select.setAttribute("width", Math.abs(at - begin));
        }
        this.show(at);
      });
      this.svg.addEventListener("pointerup", (event) => {
        const at = this.at(event), from = begin;
        begin = null;
        if (from === null || Math.abs(at - from) < 5) return;
        const ends = [from, at].map((end) => this.x.back(Math.min(Math.max(end, SPACE.left), this.width - SPACE.right)));
        state.zoom[group(this.figure)] = ends.sort((one, other) => one - other);
        redraw();
      });
      this.svg.addEventListener("dblclick", () => { delete state.zoom[group(this.figure)]; redraw(); });
      this.svg.addEventListener("pointerleave", () => { this.tip.hidden = true; this.cursor.setAttribute("visibility", "hidden"); });
    }

    show(at) {
      const x = this.x.back(Math.min(Math.max(at, SPACE.left), this.width - SPACE.right));
      const rows = [];
      let shown = null;
      for (const line of this.drawn) {
        let low = 0, high = line.x.length - 1;
        while (low < high) {
          const middle = (low + high) >> 1;
          if (line.x[middle] < x) low = middle + 1; else high = middle;
        }
        if (low && x - line.x[low - 1] < line.x[low] - x) low -= 1;
        const mean = line.mean[low];
        if (!this.inside(line.x[low]) || mean === null) continue;
        if (shown === null || Math.abs(line.x[low] - x) < Math.abs(shown - x)) shown = line.x[low];
        const unit = this.figure.unit;
        const band = line.low && line.low[low] !== line.high[low] ? ` (${format(line.low[low], unit)} to ${format(line.high[low], unit)})` : "";
        rows.push(`${this.figure.lines.length > 1 ? line.label + "  " : ""}${format(mean, unit)}${band}`);
      }
      if (shown === null) return;
      const [title, unit] = group(this.figure) === "steps" ? TITLES[state.axis] : ["time", "s"];
      this.tip.textContent = [`${title} ${unit ? format(shown, unit) : shown}`, ...rows.slice(0, 12)].join("\n");
      this.tip.hidden = false;
      const place = this.x(shown), box = this.svg.getBoundingClientRect(), ratio = box.width / this.width;
      this.cursor.setAttribute("x1", place);
      this.cursor.setAttribute("x2", place);
      this.cursor.setAttribute("visibility", "visible");
      const left = this.space.offsetLeft + place * ratio;
      this.tip.style.left = `${left + 12 + this.tip.offsetWidth > this.element.clientWidth ? Math.max(0, left - 12 - this.tip.offsetWidth) : left + 12}px`;
      this.tip.style.top = `${this.space.offsetTop + 8}px`;
    }
  }

  const plots = data.figures.map((figure, at) => new Plot(figure, document.getElementById(`figure-${at}`)));
  let pending = false;
  const redraw = () => {
    if (pending) return;
    pending = true;
    requestAnimationFrame(() => {
      pending = false;
      for (const plot of plots) plot.draw();
      const reset = document.getElementById("reset");
      if (reset) reset.disabled = !Object.keys(state.zoom).length;
    });
  };
  const controls = document.getElementById("controls");
  if (controls) {
    controls.hidden = false;
    const bind = (id, change) => document.getElementById(id).addEventListener("input", (event) => { change(event.target); redraw(); });
    bind("axis", (select) => { state.axis = select.value; delete state.zoom.steps; });
    bind("log-x", (box) => { state.logX = box.checked; });
    bind("log-y", (box) => { state.logY = box.checked; });
    bind("smooth", (slider) => { state.smooth = slider.value / 100; });
    document.getElementById("reset").addEventListener("click", () => { state.zoom = {}; redraw(); });
    for (const box of controls.querySelectorAll("input[data-run]"))
      box.addEventListener("input", () => {
        const run = Number(box.dataset.run);
        if (box.checked) state.hidden.delete(run); else state.hidden.add(run);
        redraw();
      });
  }
  let width = 0;
  new ResizeObserver(() => {
    if (document.body.clientWidth !== width) { width = document.body.clientWidth; redraw(); }
  }).observe(document.body);
  document.documentElement.dataset.ready = "yes";
})();
