"use strict";
(() => {
  const page = JSON.parse(document.getElementById("figures").textContent);
  const config = { responsive: true, displaylogo: false, modeBarButtonsToRemove: ["select2d", "lasso2d"] };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  const drawn = new Map();

  // Colours and sizes of the page: figures have none of these.
  function layoutOf(id, { figure, height }) {
    const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
    const layout = structuredClone(figure.layout);
    const axes = Object.keys(layout).filter((key) => /^[xy]axis/.test(key));
    for (const axis of axes) {
      Object.assign(layout[axis], { gridcolor: colour("--grid"), zerolinecolor: colour("--grid") });
    }
    const ends = { paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", uirevision: id, height };
    ends.font = { color: colour("--front"), family: "system-ui, sans-serif", size: 12 };
    ends.margin = { l: 40, r: 16, t: 16, b: 40 };
    ends.legend = { orientation: "h", y: 1.02, yanchor: "bottom", x: 0 };
    ends.hoverlabel = { namelength: -1 };
    ends.dragmode = matchMedia("(pointer: coarse)").matches ? false : "zoom";
    return { ...ends, ...layout };
  }

  function draw(id) {
    const place = document.getElementById(`${id}-chart`);
    const chart = page.charts[id];
    place.style.height = `${chart.height}px`;
    Plotly.react(place, structuredClone(chart.figure.data), layoutOf(id, chart), config);
    drawn.set(id, place);
  }

  // A picture is drawn when it is about to be seen, so that a page of thousands of versions opens at once.
  const seen = new IntersectionObserver(
    (entries) => {
      for (const { isIntersecting, target } of entries) {
        if (isIntersecting) {
          seen.unobserve(target);
          draw(target.id.replace(/-chart$/, ""));
        }
      }
    },
    { rootMargin: "400px" },
  );
  const watch = () => document.querySelectorAll(".chart").forEach((place) => seen.observe(place));
  watch();
  dark.addEventListener("change", () => [...drawn.keys()].forEach(draw));

  // Keys move and zoom along the first axis.
  const number = (at) => (typeof at === "number" ? at : Date.parse(`${String(at).replace(" ", "T")}Z`));
  document.addEventListener("keydown", (event) => {
    const place = event.target.closest(".chart");
    if (!place || !place.layout || event.ctrlKey || event.metaKey || event.altKey) return;
    const [first, last] = place.layout.xaxis.range.map(number);
    const moves = { ArrowLeft: [-0.2, -0.2], ArrowRight: [0.2, 0.2], "+": [0.2, -0.2], "-": [-0.4, 0.4] };
    if (event.key === "0") {
      Plotly.relayout(place, { "xaxis.autorange": true });
    } else if (moves[event.key] || event.key === "=") {
      const [left, right] = moves[event.key] || moves["+"];
      const width = last - first;
      Plotly.relayout(place, { "xaxis.range": [first + left * width, last + right * width] });
    } else {
      return;
    }
    event.preventDefault();
  });

  // A page that is served asks for what is new, and keeps what the reader has zoomed and opened.
  const details = document.querySelector("#versions details");
  let table = null;
  function showTable() {
    if (details.open && table) {
      details.querySelector(".wide").outerHTML = table;
      table = null;
    }
  }
  details.addEventListener("toggle", showTable);

  function showChart(found) {
    const fresh = document.createElement("section");
    fresh.id = found.id;
    fresh.innerHTML = found.html;
    const there = document.getElementById(found.id);
    if (!there) {
      document.getElementById("charts").append(fresh);
      seen.observe(fresh.querySelector(".chart"));
    } else {
      there.querySelector("p").replaceWith(fresh.querySelector("p"));
      if (drawn.has(found.id)) draw(found.id);
    }
  }

  async function renew() {
    if (document.hidden) return;
    const said = document.getElementById("renewed");
    try {
      const answer = await fetch(`/report.json?${page.id}`);
      const found = await answer.json();
      if (!answer.ok) throw new Error(found.error.message);
      document.getElementById("summary").innerHTML = found.summary;
      if (found.charts) {
        page.id = found.id;
        page.charts = Object.fromEntries(found.charts.map((each) => [each.id, each]));
        found.charts.forEach(showChart);
        table = found.table;
        showTable();
      }
      said.textContent = "";
    } catch (error) {
      said.textContent = `Not renewed at ${new Date().toLocaleTimeString()}: ${error.message}`;
    }
  }
  if (page.renew_s) setInterval(renew, 1000 * page.renew_s);
})();
