// Loss, metrics and the other curves, on one axis with one cursor and one zoom.

import { Chart, align, type Line, type Values } from "./chart";
import { h, theme } from "./dom";
import { lineColour } from "./machine";
import { AXES, count, describe } from "./format";
import { Panel } from "./panel";
import type { Curves, Store, Table } from "./store";

interface Drawn {
  panel: Panel;
  chart: Chart;
  zoomed: Table | null;
}

export class CurvePanels {
  private readonly drawn = new Map<string, Drawn>();
  private range: [number, number] | null = null;
  private isLog = false;

  constructor(
    private readonly store: Store,
    private readonly link: (path: string, query: Record<string, string>) => string,
    private readonly onChange: () => void,
  ) {}

  clear(): void {
    for (const { panel, chart } of this.drawn.values()) {
      chart.destroy();
      panel.element.remove();
    }
    this.drawn.clear();
    this.range = null;
  }

  get log(): boolean {
    return this.isLog;
  }

  toggleLog(): void {
    this.isLog = !this.isLog;
    this.update();
  }

  get isZoomed(): boolean {
    return this.range !== null;
  }

  zoom(range: [number, number] | null): void {
    this.range = range;
    for (const [key, drawn] of this.drawn) {
      drawn.zoomed = null;
      if (range) void this.refine(key, drawn, range);
    }
    this.update();
    this.onChange();
  }

  /** Fetch the points within the zoom, which are finer than those of the whole curve. */
  private async refine(key: string, drawn: Drawn, range: [number, number]): Promise<void> {
    const axis = this.store.panels.curves?.axis ?? "step";
    const [begin, end] = range.map(String) as [string, string];
    const answer = await fetch(this.link("curve", { name: key, axis, begin, end })).catch(() => null);
    if (!answer?.ok || this.range !== range) return;
    const table = (await answer.json()) as Table;
    if (this.range === range && table.x?.length) {
      drawn.zoomed = table;
      this.update();
    }
  }

  /** The panels in their order: the loss first, which is wide. */
  panels(): Panel[] {
    const names = this.store.panels.curves?.names ?? [];
    for (const key of this.drawn.keys()) {
      if (names.includes(key)) continue;
      this.drawn.get(key)!.chart.destroy();
      this.drawn.delete(key);
    }
    return names.map((key, at) => this.find(key, at === 0).panel);
  }

  private find(key: string, isFirst: boolean): Drawn {
    const known = this.drawn.get(key);
    if (known) return known;
    const { title, text } = describe(key);
    const axis = (): string => this.store.panels.curves?.axis ?? "step";
    const panel = new Panel(
      title,
      isFirst ? "w8" : "w4",
      () => {
        const table = this.drawn.get(key)?.zoomed ?? this.store.tables[`curve:${key}`] ?? {};
        const columns = Object.keys(table);
        return {
          columns: columns.map((name) => (name === "x" ? axis() : name)),
          rows: (table.x ?? []).map((_, at) => columns.map((name) => table[name]![at] ?? null)),
        };
      },
      () => this.link("curve.csv", { name: key, axis: axis() }),
    );
    const chart = new Chart({
      label: `${title} over the training`,
      height: isFirst ? 200 : 130,
      group: "curves",
      text,
      textX: (value) => (AXES[axis()] ?? AXES.step!).text(value),
      onZoom: (range) => this.zoom(range),
      onCursor: (pointed) => panel.point(pointed),
    });
    panel.fill(chart.element);
    const drawn = { panel, chart, zoomed: null };
    this.drawn.set(key, drawn);
    return drawn;
  }

  update(): void {
    const curves = this.store.panels.curves;
    if (!curves) return;
    for (const [key, drawn] of this.drawn) this.draw(key, drawn, curves);
  }

  private draw(key: string, { panel, chart, zoomed }: Drawn, curves: Curves): void {
    const table = zoomed ?? this.store.tables[`curve:${key}`];
    if (!table?.x?.length) {
      panel.describe("appears with the first steps");
      return;
    }
    const { unit, text } = describe(key);
    const isLoss = key === "step:loss";
    const last = [...(this.store.tables[`curve:${key}`]?.last ?? [])].reverse().find((value) => value !== null);
    const now = typeof last === "number" ? `now ${text(last)}` : "";
    const signs = isLoss && curves.marks.length ? "◆ save ▲ restart ✕ failure ■ stall" : "";
    const spread = table.low?.some((low, at) => low !== table.high?.[at]) ? "band is min–max" : "";
    panel.describe([now, unit, spread, signs].filter((part) => part).join("; "));
    const compared = this.store.panels.comparison?.runs ?? [];
    const own: Line = {
      name: this.store.panels.header?.name ?? "",
      colour: theme("acc"),
      y: table.mean as Values,
      low: table.low as Values,
      high: table.high as Values,
    };
    const parts = [{ x: table.x as number[], line: own }];
    compared.forEach((run, at) => {
      const other = this.store.tables[`other:${at}:${key}`];
      if (other?.x?.length) parts.push({ x: other.x as number[], line: { name: run.name, colour: lineColour(at + 1), y: other.mean as Values } });
    });
    const { x, lines } = align(parts);
    const marks = isLoss || key.startsWith("metric:") ? curves.marks : [];
    chart.update(x, lines, isLoss ? marks : [], this.range, this.isLog && (isLoss || key.startsWith("step:losses/")));
  }

  /** The controls above the curves. */
  controls(axis: string, onAxis: (axis: string) => void, filter: string, onFilter: (text: string) => void): HTMLElement {
    const curves = this.store.panels.curves;
    const axes = curves?.axes ?? ["step"];
    const choice = h(
      "select",
      { id: "axis", change: (event) => onAxis((event.target as HTMLSelectElement).value) },
      ...axes.map((name) => h("option", { value: name, selected: name === axis }, AXES[name]?.name ?? name)),
    );
    const search = h("input", {
      type: "search",
      id: "filter",
      value: filter,
      size: 14,
      placeholder: "all",
      change: (event) => onFilter((event.target as HTMLInputElement).value),
    });
    const hidden = (curves?.count ?? 0) - (curves?.names.length ?? 0);
    return h(
      "div",
      { class: "bar" },
      h("label", {}, "over ", choice),
      h("button", { type: "button", "aria-pressed": String(this.isLog), click: () => (this.toggleLog(), this.onChange()) }, "log loss"),
      h("label", {}, "curves with ", search),
      hidden > 0 ? h("span", {}, `${count(hidden)} not shown; filter by name`) : null,
      this.isZoomed ? h("button", { type: "button", click: () => this.zoom(null) }, "show all") : h("span", { class: "wide" }, "drag over a curve to zoom in"),
    );
  }
}
