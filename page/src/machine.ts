// Samples of one node: a figure for each kind, with one cursor for all.

import { Chart, type Line, type Values } from "./chart";
import { h, isDark, legend } from "./dom";
import { AXES, NONE, number, type Value } from "./format";
import { Panel } from "./panel";
import type { Store } from "./store";

// Colours of Okabe and Ito, which colour-blind people can tell apart, in an order of strong contrast.
const LIGHT = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#56b4e9", "#b8860b", "#4b4b4b", "#8c6bb1"];
const DARK = ["#56b4e9", "#ff8c42", "#2fc79b", "#e39cc4", "#3d8fd1", "#f0e442", "#c0c0c0", "#b39ddb"];
const MAX_NAMES = 8; // in a legend; the table has all
export const lineColour = (at: number): string => (isDark() ? DARK : LIGHT)[at % LIGHT.length]!;

export function amount(value: Value, unit: string): string {
  if (value === null || value === undefined) return NONE;
  if (unit === "MiB" && Math.abs(value) >= 1024) return `${number(value / 1024, 3)} GiB`;
  if (unit === "MB/s" && Math.abs(value) >= 1000) return `${number(value / 1000, 3)} GB/s`;
  return `${number(value, 3)} ${unit === "C" ? "°C" : unit}`.trim();
}

export class MachinePanels {
  private readonly drawn = new Map<string, { panel: Panel; chart: Chart }>();

  constructor(
    private readonly store: Store,
    private readonly onNode: (node: string) => void,
  ) {}

  clear(): void {
    for (const { chart } of this.drawn.values()) chart.destroy();
    this.drawn.clear();
  }

  /** The heading with the choice of the node. */
  heading(): HTMLElement | null {
    const machine = this.store.panels.machine;
    if (!machine) return null;
    if (!machine.nodes.length) return h("div", { class: "bar" }, "Samples of the machines appear here, if the run was started with --monitor.");
    const choice = h(
      "select",
      { id: "node", change: (event) => this.onNode((event.target as HTMLSelectElement).value) },
      ...machine.nodes.map((name, at) => h("option", { value: at, selected: at === machine.node }, name)),
    );
    const absent = machine.absent?.length ? h("span", { title: machine.absent.join("\n") }, `not sampled: ${machine.absent.map((text) => text.split(":")[0]).join(", ")}`) : null;
    return h("div", { class: "bar" }, h("label", {}, "machine ", choice), absent);
  }

  panels(): Panel[] {
    const figures = this.store.panels.machine?.figures ?? [];
    return figures.map(({ title, unit }) => this.find(title, unit));
  }

  private find(title: string, unit: string): Panel {
    const known = this.drawn.get(title);
    if (known) return known.panel;
    const panel = new Panel(title, "w3", () => {
      const table = this.store.tables[`machine:${title}`] ?? {};
      const columns = Object.keys(table);
      return {
        columns: columns.map((name) => (name === "x" ? "seconds" : `${name} (${unit})`)),
        rows: (table.x ?? []).map((_, at) => columns.map((name) => table[name]![at] ?? null)),
      };
    });
    const chart = new Chart({
      label: `${title} over time`,
      height: 110,
      group: "machine",
      isFromZero: !title.includes("temperature"),
      text: (value) => amount(value, unit),
      textX: AXES.time!.text,
      onCursor: (text) => panel.point(text),
    });
    panel.fill(chart.element);
    this.drawn.set(title, { panel, chart });
    return panel;
  }

  update(): void {
    for (const { title, unit } of this.store.panels.machine?.figures ?? []) {
      const drawn = this.drawn.get(title);
      const table = this.store.tables[`machine:${title}`];
      if (!drawn || !table?.x) continue;
      const names = Object.keys(table).filter((name) => name !== "x");
      const lines: Line[] = names.map((name, at) => ({ name, colour: lineColour(at), y: table[name] as Values, isUnlabelled: true }));
      const last = lines.map((line) => line.y[line.y.length - 1]).filter((value) => typeof value === "number");
      const range = last.length ? `now ${last.length > 2 ? `${amount(Math.min(...last), unit)} to ${amount(Math.max(...last), unit)}` : last.map((value) => amount(value, unit)).join(", ")}` : "";
      drawn.panel.describe(range);
      if (names.length > 1) drawn.panel.fill(drawn.chart.element, legend(names.slice(0, MAX_NAMES).map((text, at) => [text, lineColour(at)])));
      drawn.chart.update(table.x as number[], lines);
    }
  }
}
