// Where the time of a step and the memory of a rank go, measured and predicted.

import { stackedBars } from "./bars";
import { Chart, type Line } from "./chart";
import { h, legend, shade, theme } from "./dom";
import { AXES, NONE, bytes, percent, seconds } from "./format";
import { Panel, type Rows } from "./panel";
import type { PartRow, Parts, Store, Table } from "./store";

function compare(rows: PartRow[] | undefined, text: (value: number | null) => string): Rows {
  return {
    columns: ["part", "measured", "predicted", "±", "difference"],
    rows: (rows ?? []).map(([name, measured, predicted, spread]) => [
      name,
      text(measured),
      predicted === null ? NONE : text(predicted),
      predicted === null ? NONE : text(spread),
      predicted === null || !measured ? NONE : percent((predicted - measured) / measured),
    ]),
  };
}

function legendOf(names: string[], colours: Record<string, string>): HTMLElement {
  return legend(names.map((name) => [name, shade(colours[name] ?? "#969696")]));
}

export class PartsPanels {
  readonly step: Panel;
  readonly memory: Panel;
  readonly history: Panel;
  private readonly chart: Chart;

  constructor(private readonly store: Store) {
    this.step = new Panel("A step", "w4", () => compare(this.store.panels.parts?.time, seconds));
    this.memory = new Panel("Memory of a rank", "w4", () => compare(this.store.panels.parts?.memory, bytes));
    this.history = new Panel("Parts of a step over time", "w8", () => this.historyTable());
    this.chart = new Chart({
      label: "Seconds of a step by part over time",
      height: 180,
      group: "curves",
      text: seconds,
      textX: (value) => this.textX(value),
      isFromZero: true,
      onCursor: (text) => this.history.point(text),
    });
  }

  get panels(): Panel[] {
    return [this.step, this.history, this.memory];
  }

  private textX(value: number): string {
    return (AXES[this.store.panels.curves?.axis ?? "step"] ?? AXES.step!).text(value);
  }

  private historyTable(): Rows {
    const table = this.store.tables.parts ?? {};
    const names = Object.keys(table).filter((name) => name === "x" || table[name]!.some((value) => value));
    return {
      columns: names.map((name) => (name === "x" ? (this.store.panels.curves?.axis ?? "step") : `${name} (s)`)),
      rows: (table.x ?? []).map((_, at) => names.map((name) => table[name]![at] ?? null)),
    };
  }

  update(): void {
    const parts = this.store.panels.parts;
    if (!parts) return;
    this.showBars(parts);
    this.showHistory(parts, this.store.tables.parts ?? {});
  }

  private showBars(parts: Parts): void {
    const hint = parts.unpredicted ? h("p", { class: "note" }, parts.unpredicted) : null;
    if (!parts.time || !parts.memory) {
      const why = parts.problem ?? "no events yet";
      for (const panel of [this.step, this.memory]) {
        panel.describe("");
        panel.fill(h("p", { class: "empty" }, `No profile: ${why}. Bars appear after the first profiled step.`));
      }
      return;
    }
    const isPredicted = parts.time.some((row) => row[2] !== null);
    this.step.describe(isPredicted ? "predicted (± 1 σ) and measured" : "measured, mean of the steps");
    const slow =
      typeof parts.straggler === "number"
        ? h("p", { class: "problem" }, `Rank ${parts.straggler} is busy for ${seconds(parts.straggler_busy_s)} of a step, the mean rank for ${seconds(parts.mean_busy_s)}.`)
        : null;
    const names = (rows: PartRow[]): string[] => rows.map((row) => row[0]);
    this.step.fill(
      stackedBars(parts.time, parts.colours, seconds, `A step takes ${seconds(parts.step_s)}`),
      legendOf(names(parts.time), parts.colours),
      slow,
      hint,
    );
    this.memory.describe(`at the peak, rank ${parts.peak_rank}`);
    this.memory.fill(
      stackedBars(parts.memory, parts.memory_colours, bytes, "Memory of a rank by part"),
      legendOf(names(parts.memory), parts.memory_colours),
      hint && isPredicted ? hint : null,
    );
  }

  private showHistory(parts: Parts, table: Table): void {
    const x = (table.x ?? []) as number[];
    if (!x.length) {
      this.history.describe("");
      this.history.fill(h("p", { class: "empty" }, "The parts appear here with the first profiled step."));
      return;
    }
    this.history.describe(parts.time?.some((row) => row[2] !== null) ? "stacked; profiled steps, mean of the ranks; the dashed line is the predicted step" : "stacked; profiled steps, mean of the ranks");
    const names = Object.keys(table).filter((name) => name !== "x" && table[name]!.some((value) => value));
    this.history.fill(this.chart.element, legendOf(names, parts.colours));
    const sums = x.map(() => 0);
    const lines: Line[] = names.map((name) => {
      const colour = shade(parts.colours[name] ?? "#969696");
      table[name]!.forEach((value, at) => (sums[at]! += Number(value ?? 0)));
      return { name, colour, fill: colour, y: [...sums], isUnlabelled: true };
    });
    lines.reverse(); // the largest sum first, so that the others are drawn over it
    const predicted = (parts.time ?? []).reduce((sum, row) => sum + (row[2] ?? 0), 0);
    if (predicted) lines.push({ name: "predicted", colour: theme("fg"), y: x.map(() => predicted), dash: [6, 4], isUnlabelled: true });
    this.chart.update(x, lines);
  }
}
