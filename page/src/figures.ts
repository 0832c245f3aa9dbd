// The images that the task draws at evaluations, of one step at a time.

import { h } from "./dom";
import { count } from "./format";
import { Panel } from "./panel";
import type { Figure, Store } from "./store";

const SMALL = 160; // pixels; a smaller image is enlarged by a whole factor

export class FiguresPanel {
  readonly panel: Panel;
  private readonly slider = h("input", { type: "range", min: 0, "aria-label": "Step of the figures", input: () => this.choose() });
  private readonly images = new Map<string, HTMLElement>();
  private step: number | null = null; // null: the last one
  private run = "";

  constructor(
    private readonly store: Store,
    private readonly link: (path: string, query: Record<string, string>) => string,
  ) {
    this.panel = new Panel("Figures", "w12", () => ({
      columns: ["figure", "step"],
      rows: this.figures.flatMap(({ name, steps }) => steps.map((step): [string, number] => [name, step])),
    }));
    this.panel.tools.prepend(this.slider);
  }

  private get figures(): Figure[] {
    return this.store.panels.figures?.figures ?? [];
  }

  get isShown(): boolean {
    return this.figures.length > 0;
  }

  /** The steps of all figures, in their order. */
  private get steps(): number[] {
    return [...new Set(this.figures.flatMap((figure) => figure.steps))].sort((one, other) => one - other);
  }

  private choose(): void {
    const steps = this.steps;
    const at = Number(this.slider.value);
    this.step = at < steps.length - 1 ? (steps[at] ?? null) : null;
    this.update();
  }

  update(): void {
    const steps = this.steps;
    const last = steps[steps.length - 1];
    if (last === undefined) return;
    const run = this.link("figure", {});
    if (run !== this.run) [this.run, this.step] = [run, null];
    // The oldest files of a figure are deleted while the run trains.
    if (this.step !== null && !steps.includes(this.step)) this.step = steps.find((step) => step > this.step!) ?? null;
    const shown = this.step ?? last;
    this.slider.max = String(steps.length - 1);
    this.slider.value = String(steps.indexOf(shown));
    this.slider.setAttribute("aria-valuetext", `step ${count(shown)}`);
    this.slider.hidden = steps.length < 2;
    this.panel.describe(`step ${count(shown)}${this.step === null ? ", the last" : ""}; ${count(steps.length)} ${steps.length === 1 ? "step has" : "steps have"} figures`);
    const known = new Set<string>();
    const elements = this.figures.map((figure) => {
      // A figure that was not drawn at this step shows the step before.
      const step = [...figure.steps].reverse().find((own) => own <= shown) ?? figure.steps[0]!;
      const address = this.link("figure", { figure: figure.id, step: String(step) });
      known.add(address);
      const element = this.images.get(address) ?? this.build(figure.name, step, address);
      this.images.set(address, element);
      return element;
    });
    for (const address of [...this.images.keys()]) if (!known.has(address)) this.images.delete(address);
    const before = this.panel.body.firstElementChild;
    const isSame = before?.children.length === elements.length && elements.every((element, at) => before.children[at] === element);
    if (!isSame) this.panel.fill(h("div", { class: "figures" }, ...elements));
  }

  private build(name: string, step: number, address: string): HTMLElement {
    const image = h("img", { alt: `${name}, step ${count(step)}`, src: address });
    const element = h("figure", {}, image, h("figcaption", {}, `${name}, step ${count(step)}`));
    image.addEventListener("load", () => {
      const factor = Math.floor(SMALL / Math.max(image.naturalWidth, image.naturalHeight));
      if (factor < 2) return;
      image.width = factor * image.naturalWidth;
      image.classList.add("pixels");
    });
    image.addEventListener("error", () => image.replaceWith(h("p", { class: "empty" }, "The file was deleted, is larger than 16 MiB, or is not a PNG image.")));
    return element;
  }
}
