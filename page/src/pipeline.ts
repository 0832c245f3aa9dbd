// A traced step of a pipeline: what each stage computes when, over its ideal schedule.

import { h, inkOn, legend, shade, svg } from "./dom";
import { count, percent, seconds } from "./format";
import { Panel } from "./panel";
import type { Action, Pipeline, Store } from "./store";

const KINDS = ["forward", "backward", "weight gradients"];
const COLOURS = ["#6baed6", "#08306b", "#41ab5d"];
const BUBBLE = "#d9d9d9";
const LEFT = 60;
const ROW = 36;

export class PipelinePanel {
  readonly panel: Panel;

  constructor(private readonly store: Store) {
    this.panel = new Panel("Pipeline", "w12", () => ({
      columns: ["stage", "pass", "micro-batch", "begin (µs)", "end (µs)"],
      rows: (this.store.panels.pipeline?.actions ?? []).map(([stage, kind, batch, begin, end]) => [stage, KINDS[kind] ?? "", batch, begin, end]),
    }));
    new ResizeObserver(() => this.update()).observe(this.panel.element);
  }

  get isShown(): boolean {
    return !!this.store.panels.pipeline;
  }

  update(): void {
    const pipeline = this.store.panels.pipeline;
    if (!pipeline) return;
    if (!pipeline.actions?.length) {
      this.panel.describe("");
      this.panel.fill(h("p", { class: "empty" }, pipeline.problem ?? ""));
      return;
    }
    const ideal = typeof pipeline.ideal_bubble === "number" ? ` (ideal ${percent(pipeline.ideal_bubble)})` : "";
    this.panel.describe(`step ${count(pipeline.step)}, ${seconds((pipeline.span_us ?? 0) / 1e6)}; bubble ${percent(pipeline.bubble ?? 0)}${ideal}; below each stage the ideal schedule: stages equally fast, sends without time`);
    const kinds = new Set(pipeline.actions.map((action) => action[1]));
    const names = KINDS.map((name, at): [string, string] => [name, shade(COLOURS[at]!)]).filter((_, at) => kinds.has(at));
    this.panel.fill(this.draw(pipeline), legend([...names, ["bubble", shade(BUBBLE)]]));
  }

  private draw(pipeline: Pipeline): SVGSVGElement {
    const width = Math.max(280, this.panel.body.clientWidth || 1000);
    const stages = pipeline.stages ?? [];
    const actions = pipeline.actions ?? [];
    const end = Math.max(...[...actions, ...(pipeline.ideal ?? [])].map((action) => action[4]));
    const scale = (width - LEFT - 8) / end;
    const span = Math.max(...actions.map((action) => action[4])) * scale;
    const label = `Pipeline of step ${pipeline.step}: ${stages.length} stages, bubble ${percent(pipeline.bubble ?? 0)}`;
    const picture = svg("svg", { viewBox: `0 0 ${width} ${stages.length * ROW + 4}`, role: "img", "aria-label": label });
    const rows = new Map(stages.map((stage, at) => [stage, 4 + at * ROW]));
    for (const [stage, y] of rows) {
      picture.append(svg("text", { x: LEFT - 8, y: y + 14, "text-anchor": "end" }, `stage ${stage}`));
      picture.append(svg("rect", { x: LEFT, y, width: span, height: 20, fill: shade(BUBBLE), opacity: 0.35 }));
    }
    const place = ([stage, kind, batch, begin, until]: Action, isIdeal: boolean): void => {
      const y = rows.get(stage);
      const colour = shade(COLOURS[kind] ?? BUBBLE);
      if (y === undefined) return;
      const size = Math.max(0.5, (until - begin) * scale - 0.6);
      const title = svg("title", {}, `${isIdeal ? "ideal: " : ""}${KINDS[kind]} of micro-batch ${batch} on stage ${stage}: ${seconds((until - begin) / 1e6)}`);
      const box = { x: LEFT + begin * scale, width: size };
      picture.append(svg("rect", isIdeal ? { ...box, y: y + 22, height: 6, fill: "none", stroke: colour, "stroke-width": 0.8 } : { ...box, y, height: 20, fill: colour }, title));
      if (!isIdeal && size > 16) picture.append(svg("text", { x: box.x + size / 2, y: y + 14, "text-anchor": "middle", class: inkOn(colour) === "#ffffff" ? "ink" : "dark" }, batch));
    };
    for (const action of pipeline.ideal ?? []) place(action, true);
    for (const action of actions) place(action, false);
    return picture;
  }
}
