"use strict";
(() => {
  // Everything that comes from records goes into the page as text: never as markup.
  const make = (name, attributes = {}, ...children) => {
    const element = document.createElement(name);
    for (const [key, value] of Object.entries(attributes)) {
      if (value === null || value === undefined || value === false) continue;
      if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
      else element.setAttribute(key, value === true ? "" : value);
    }
    element.append(...children);
    return element;
  };

  const significant = (value) => {
    const three = value.toPrecision(3);
    return three.includes("e") ? String(Number(three)) : three;
  };
  const seconds = (value) => {
    if (value >= 7200) return `${(value / 3600).toFixed(1)} h`;
    if (value >= 60) return `${Math.floor(value / 60)} min ${Math.floor(value % 60)} s`;
    for (const [unit, size] of [["s", 1], ["ms", 1e-3], ["µs", 1e-6]])
      if (value >= size) return `${significant(value / size)} ${unit}`;
    return `${significant(value * 1e9)} ns`;
  };
  const amount = (value, unit) => {
    for (const [prefix, size] of [["P", 1e15], ["T", 1e12], ["G", 1e9], ["M", 1e6], ["k", 1e3]])
      if (value >= size) return `${significant(value / size)} ${prefix}${unit}`;
    return `${significant(value)} ${unit}`;
  };
  // A page from a file may not use the clipboard of newer browsers; the old command still works there.
  const copied = async (text) => {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      const area = make("textarea", { readonly: true, style: "position:fixed;top:0;opacity:0" });
      area.value = text;
      document.body.append(area);
      area.select();
      const done = document.execCommand("copy");
      area.remove();
      return done;
    }
  };
  const copying = (button) => async () => {
    const name = button.textContent, done = await copied(button.dataset.copy);
    button.textContent = done ? "Copied" : "Press Ctrl+C";
    setTimeout(() => { button.textContent = name; }, 1500);
  };
  const copier = (name, command) => {
    const button = make("button", { type: "button", class: "copy", title: command, "data-copy": command }, name);
    button.addEventListener("click", copying(button));
    return button;
  };
  const write = {
    text: String,
    code: String,
    count: (value) => value.toLocaleString("en"),
    number: String,
    time: seconds,
    ratio: (value) => `${value < 10 ? value.toFixed(2) : value < 100 ? value.toFixed(1) : value.toFixed(0)} ×`,
    part: (value) => `${Math.round(value * 100)} %`,
    flops: (value) => amount(value, "FLOP/s"),
    bytes: (value) => amount(value, "B/s"),
    id: String,
    command: String,
    date: (value) => new Date(value * 1000).toISOString().slice(0, 16).replace("T", " "),
  };
  const isText = (kind) => kind === "text" || kind === "code" || kind === "id" || kind === "command";

  class Table {
    constructor(place, columns) {
      this.place = place;
      this.columns = columns;
      this.size = columns.length ? columns[0].at.length : 0;
      this.page = Number(place.dataset.page);
      this.printed = Number(place.dataset.printed);
      this.first = 0;
      this.rows = Array.from({ length: this.size }, (_, row) => row);
      this.sorted = null;
      this.body = make("tbody");
      this.build();
      this.show();
    }

    value(column, row) {
      const at = column.at[row];
      return column.of && at !== null ? column.of[at] : at;
    }

    build() {
      const label = this.place.dataset.label;
      this.filter = make("input", { type: "search", placeholder: "Filter", "aria-label": `Filter ${label}`, oninput: () => this.choose() });
      this.picks = this.columns.filter((c) => c.pick && c.of && c.of.length > 1).map((column) => {
        const all = make("option", { value: "" }, `every ${column.name.toLowerCase()}`);
        const options = column.of.slice(0, 500).map((name, index) => make("option", { value: index }, name));
        const select = make("select", { "aria-label": column.name, onchange: () => this.choose() }, all, ...options);
        return [column, select];
      });
      this.count = make("span", { class: "count", role: "status" });
      this.back = make("button", { type: "button", "aria-label": "Previous page", onclick: () => this.turn(-1) }, "←");
      this.next = make("button", { type: "button", "aria-label": "Next page", onclick: () => this.turn(1) }, "→");
      this.heads = this.columns.map((column) =>
        make("th", { scope: "col", class: isText(column.kind) ? null : "number" },
          make("button", { type: "button", title: column.hint || null, onclick: () => this.sort(column) }, column.name)));
      const table = make("table", {}, make("caption", { hidden: true }, label), make("thead", {}, make("tr", {}, ...this.heads)), this.body);
      const bar = make("div", { class: "bar" }, this.filter, ...this.picks.map(([, select]) => select), this.count, this.back, this.next);
      this.place.replaceChildren(bar, make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": label }, table));
      bar.hidden = this.size <= 6;
    }

    text(row) {
      this.texts ||= new Array(this.size);
      return (this.texts[row] ||= this.columns.filter((c) => isText(c.kind)).map((c) => this.value(c, row) ?? "").join(" ").toLowerCase());
    }

    choose() {
      const words = this.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
      const picked = this.picks.filter(([, select]) => select.value !== "").map(([column, select]) => [column, Number(select.value)]);
      this.rows = [];
      for (let row = 0; row < this.size; row += 1)
        if (picked.every(([column, index]) => column.at[row] === index) && words.every((word) => this.text(row).includes(word)))
          this.rows.push(row);
      this.first = 0;
      this.order();
      this.show();
    }

    sort(column) {
      const down = this.sorted && this.sorted.column === column ? !this.sorted.down : Boolean(column.down);
      this.sorted = { column, down };
      this.first = 0;
      this.order();
      this.show();
    }

    order() {
      if (!this.sorted) return;
      const { column, down } = this.sorted;
      const compare = isText(column.kind) ? new Intl.Collator("en", { numeric: true }).compare : (a, b) => a - b;
      const keys = new Map(this.rows.map((row) => [row, this.value(column, row)]));
      this.rows.sort((a, b) => {
        const x = keys.get(a), y = keys.get(b);
        if (x === null || y === null) return (x === null) - (y === null) || a - b;
        return (down ? compare(y, x) : compare(x, y)) || a - b;
      });
    }

    turn(pages) {
      this.first = Math.max(0, Math.min(this.first + pages * this.page, this.rows.length - 1));
      this.show();
    }

    show(most = this.page) {
      const shown = this.rows.slice(this.first, this.first + most);
      this.body.replaceChildren(...shown.map((row) => make("tr", {}, ...this.columns.map((column) => this.cell(column, row)))));
      this.heads.forEach((head, index) => {
        const mine = this.sorted && this.sorted.column === this.columns[index];
        if (mine) head.setAttribute("aria-sort", this.sorted.down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      const of = this.rows.length === this.size ? "" : ` of ${write.count(this.size)}`;
      const range = this.rows.length > most ? `${write.count(this.first + 1)}–${write.count(this.first + shown.length)} of ` : "";
      this.count.textContent = `${range}${write.count(this.rows.length)}${range ? "" : of}`;
      this.back.disabled = this.first === 0;
      this.next.disabled = this.first + most >= this.rows.length;
    }

    cell(column, row) {
      const value = this.value(column, row);
      const missing = value === null || value === "";
      const words = missing ? "" : write[column.kind](value);
      const marks = [isText(column.kind) ? "" : "number", column.kind === "code" ? "code" : "", column.kind === "date" ? "date" : "", column.wide ? "wide" : "", column.marks ? String(value).replace(/\W+/g, "-") : ""];
      const shown = missing ? "" : column.kind === "id" ? copier(words, `tunebook explain ${words}`) : column.kind === "command" ? copier("Copy", words) : words;
      return make("td", { class: marks.filter(Boolean).join(" ") || null, "data-name": column.name }, ...(missing ? [] : [shown]));
    }
  }

  const unpacked = async (node) => {
    if (node.type === "application/json") return JSON.parse(node.textContent);
    const bytes = Uint8Array.from(atob(node.textContent.trim()), (letter) => letter.charCodeAt(0));
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    return JSON.parse(await new Response(stream).text());
  };

  const start = async () => {
    const toggle = document.querySelector(".toggle");
    const dark = () => getComputedStyle(document.documentElement).colorScheme === "dark";
    const name = () => { toggle.textContent = dark() ? "Light" : "Dark"; };
    toggle.addEventListener("click", () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; name(); });
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", name);
    name();

    for (const button of document.querySelectorAll(".copy")) button.addEventListener("click", copying(button));

    const data = document.getElementById("data"), places = [...document.querySelectorAll("[data-table]")];
    if (data.type !== "application/json" && !self.DecompressionStream) {
      for (const place of places) place.textContent = "This browser is too old to unpack the tables.";
      return;
    }
    const tables = await unpacked(data);
    const made = places.map((place) => new Table(place, tables[place.dataset.table]));
    const closed = () => [...document.querySelectorAll("details:not([open])")];
    let opened = [];
    addEventListener("beforeprint", () => {
      opened = closed();
      for (const each of opened) each.open = true;
      for (const table of made) table.show(table.printed);
    });
    addEventListener("afterprint", () => {
      for (const each of opened) each.open = false;
      for (const table of made) table.show();
    });
    document.documentElement.dataset.ready = "yes";
  };
  start();
})();
