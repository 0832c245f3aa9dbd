// A chart of lines with their bands, drawn by uPlot.

import uPlot from "uplot";
import { h, theme } from "./dom";
import type { Mark } from "./store";

export type Values = (number | null)[];

export interface Line {
  name: string;
  colour: string;
  y: Values;
  low?: Values;
  high?: Values;
  fill?: string;
  dash?: number[];
  isUnlabelled?: boolean;
  isJoined?: boolean; // its points lie between those of other lines
}

/** Put lines with points of their own over one x. */
export function align(parts: { x: number[]; line: Line }[]): { x: number[]; lines: Line[] } {
  if (parts.length === 1) return { x: parts[0]!.x, lines: [parts[0]!.line] };
  const x = [...new Set(parts.flatMap((part) => part.x))].sort((a, b) => a - b);
  const places = new Map(x.map((value, at) => [value, at]));
  const spread = (from: number[], values?: Values): Values | undefined => {
    if (!values) return undefined;
    const wide: Values = new Array<number | null>(x.length).fill(null);
    from.forEach((value, at) => (wide[places.get(value)!] = values[at] ?? null));
    return wide;
  };
  const lines = parts.map(({ x: own, line }) => ({ ...line, y: spread(own, line.y)!, low: spread(own, line.low), high: spread(own, line.high), isJoined: true }));
  return { x, lines };
}

export interface ChartOptions {
  label: string;
  height: number;
  group: string; // charts of a group share their cursor
  text: (value: number | null) => string;
  textX: (value: number) => string;
  isFromZero?: boolean;
  onZoom?: (range: [number, number] | null) => void;
  onCursor?: (text: string) => void;
}

const SIGNS = { save: "◆", failure: "✕", stall: "■", restart: "▲" };
const FONT = "11px system-ui, sans-serif";

export class Chart {
  readonly element: HTMLDivElement;
  private plot: uPlot | null = null;
  private shape = "";
  private x: number[] = [];
  private lines: Line[] = [];
  private marks: Mark[] = [];
  private range: [number, number] | null = null;
  private isLog = false;

  constructor(private readonly options: ChartOptions) {
    this.element = h("div", { class: "chart", role: "img", "aria-label": options.label });
    this.element.style.height = `${options.height}px`;
    new ResizeObserver(() => this.resize()).observe(this.element);
  }

  /** Show lines over the same x. range: the zoom; null shows all. */
  update(x: number[], lines: Line[], marks: Mark[] = [], range: [number, number] | null = null, isLog = false): void {
    Object.assign(this, { x, lines, marks, range });
    this.isLog = isLog && lines.every((line) => [line.y, line.low ?? []].every((all) => all.every((y) => y === null || y > 0)));
    const shape = JSON.stringify([lines.map((line) => [line.name, line.colour, !!line.low, line.fill]), this.isLog, theme("bg")]);
    if (shape !== this.shape || this.plot === null) {
      this.shape = shape;
      this.create();
    } else {
      this.plot.setData(this.data(), false);
      this.rescale();
    }
  }

  destroy(): void {
    this.plot?.destroy();
    this.plot = null;
  }

  private data(): uPlot.AlignedData {
    const columns: Values[] = [];
    for (const line of this.lines) {
      columns.push(line.y);
      if (line.low && line.high) columns.push(line.low, line.high);
    }
    return [this.x, ...columns] as uPlot.AlignedData;
  }

  private rescale(): void {
    const [first, last] = [this.x[0] ?? 0, this.x[this.x.length - 1] ?? 1];
    const [min, max] = this.range ?? [first, last > first ? last : first + 1];
    this.plot?.batch(() => this.plot?.setScale("x", { min, max }));
  }

  private resize(): void {
    const width = this.element.clientWidth;
    if (width && this.plot && width !== this.plot.width) this.plot.setSize({ width, height: this.options.height });
    else if (width && !this.plot && this.lines.length) this.create();
  }

  private create(): void {
    this.destroy();
    const width = this.element.clientWidth;
    if (!width) return;
    const muted = theme("mut");
    const series: uPlot.Series[] = [{}];
    const bands: uPlot.Band[] = [];
    for (const line of this.lines) {
      series.push({ label: line.name, stroke: line.colour, width: 1.5, fill: line.fill, dash: line.dash, points: { show: this.x.length < 3 }, spanGaps: line.isJoined });
      if (line.low && line.high) {
        const at = series.length;
        for (const _ of [line.low, line.high]) series.push({ stroke: "transparent", width: 0, points: { show: false }, spanGaps: line.isJoined });
        bands.push({ series: [at + 1, at], fill: fade(line.colour) });
      }
    }
    const { text, textX } = this.options;
    const axis = { stroke: muted, font: FONT, grid: { stroke: theme("line"), width: 1 }, ticks: { show: false } };
    this.plot = new uPlot(
      {
        width,
        height: this.options.height,
        padding: [8, 24, 0, 0],
        legend: { show: false },
        series,
        bands,
        scales: {
          x: { time: false },
          y: this.isLog ? { distr: 3 } : { range: (_, low, high) => (this.options.isFromZero ? [0, (high ?? 1) * 1.06 || 1] : padded(low, high)) },
        },
        axes: [
          { ...axis, grid: { show: false }, size: 22, gap: 4, space: 80, values: (_, all) => all.map((value, at) => (at && textX(value) === textX(all[at - 1]!) ? "" : textX(value))) },
          { ...axis, size: (_, labels) => Math.max(58, ...(labels ?? []).map((label) => 14 + 6.5 * (label ?? "").length)), gap: 4, space: 34, values: (_, all) => all.map((value) => (value === null ? "" : text(value))) },
        ],
        cursor: {
          drag: { x: true, y: false, setScale: false },
          points: { size: 6 },
          // Charts share the cursor; a drag belongs to the chart on which it began.
          sync: { key: this.options.group, scales: ["x", null], filters: { pub: () => true, sub: (type) => type === "mousemove" || type === "mouseleave" } },
          bind: { dblclick: () => () => (this.options.onZoom?.(null), null) },
        },
        hooks: {
          setSelect: [(plot) => this.select(plot)],
          setCursor: [(plot) => this.report(plot)],
          draw: [(plot) => this.annotate(plot)],
        },
      },
      this.data(),
      this.element,
    );
    this.rescale();
  }

  private select(plot: uPlot): void {
    if (plot.select.width < 4) return;
    const range: [number, number] = [plot.posToVal(plot.select.left, "x"), plot.posToVal(plot.select.left + plot.select.width, "x")];
    plot.setSelect({ left: 0, top: 0, width: 0, height: 0 }, false);
    this.options.onZoom?.(range);
  }

  private report(plot: uPlot): void {
    const at = plot.cursor.idx;
    if (at === null || at === undefined || (plot.cursor.left ?? -1) < 0) {
      this.options.onCursor?.("");
      return;
    }
    const values = this.lines.map((line) => {
      const band = line.low && line.low[at] !== line.high?.[at] ? ` (${this.options.text(line.low[at] ?? null)} to ${this.options.text(line.high?.[at] ?? null)})` : "";
      return `${this.lines.length > 1 ? `${line.name} ` : ""}${this.options.text(line.y[at] ?? null)}${band}`;
    });
    this.options.onCursor?.(`${this.options.textX(this.x[at] ?? 0)}: ${values.join(", ")}`);
  }

  /** Draw the marks, and the name of each line at its end. */
  private annotate(plot: uPlot): void {
    const { ctx } = plot;
    const ratio = devicePixelRatio;
    const [left, right] = [plot.bbox.left, plot.bbox.left + plot.bbox.width];
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "center";
    const first = this.lines[0];
    for (const mark of this.marks) {
      const x = plot.valToPos(mark.x, "x", true);
      if (x < left || x > right || !first) continue;
      let at = plot.valToIdx(mark.x);
      while (at > 0 && (first.y[at] ?? null) === null) at -= 1; // the points of other runs lie between
      const value = first.high?.[at] ?? first.y[at];
      const y = value === null || value === undefined ? plot.bbox.top + 10 * ratio : plot.valToPos(value, "y", true);
      ctx.fillStyle = mark.kind === "save" ? theme("mut") : theme("warn");
      ctx.fillText(SIGNS[mark.kind], x, Math.max(plot.bbox.top + 9 * ratio, y - 7 * ratio));
    }
    ctx.textAlign = "right";
    if (this.lines.length > 1) {
      let before = { x: Infinity, y: Infinity };
      for (const line of this.lines) {
        if (line.isUnlabelled) continue;
        let at = line.y.length - 1;
        while (at > 0 && (line.y[at] ?? null) === null) at -= 1;
        const value = line.y[at];
        if (value === undefined || value === null) continue;
        const x = Math.min(right, plot.valToPos(this.x[at]!, "x", true)) - 4 * ratio;
        const y = plot.valToPos(value, "y", true) - 4 * ratio;
        if (x < left || (Math.abs(y - before.y) < 12 * ratio && Math.abs(x - before.x) < 60 * ratio)) continue;
        before = { x, y };
        ctx.fillStyle = line.colour;
        ctx.fillText(line.name.length > 20 ? `${line.name.slice(0, 19)}…` : line.name, x, Math.max(plot.bbox.top + 9 * ratio, y));
      }
    }
    ctx.restore();
  }
}

function fade(colour: string): string {
  const parts = colour.match(/^#(..)(..)(..)$/);
  return parts ? `rgb(${parts.slice(1).map((part) => parseInt(part, 16)).join(" ")} / 18%)` : colour.replace(")", " / 18%)");
}

function padded(low: number | null, high: number | null): uPlot.Range.MinMax {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 ? [0, 1] : [Math.min(low * 0.9, low * 1.1), Math.max(low * 0.9, low * 1.1)];
  const room = (high - low) * 0.06;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high + room];
}
