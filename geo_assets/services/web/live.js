// The live stream of devices, triggers and fences: one connection while the page is in view, for the box it shows.

import { boxText, here, viewBox, within } from './dom.js';

/**
 * Hear the stream.
 *
 * @param {object} map A maplibre-gl map.
 * @param {string[]} show What to hear: fences, devices, triggers.
 * @param {{devices: function, triggers: function, fences: function, box: function, status: function}} on
 */
export function openLive(map, show, on) {
  let source = null, box = null, zoom = 0, timer = 0;

  const close = () => { source?.close(); source = null; clearTimeout(timer); };
  const connect = () => {
    close();
    if (document.hidden) return; // browsers allow six connections a host: a page that nobody sees holds none
    box = viewBox(map, 0.5);
    zoom = map.getZoom();
    on.box(box);
    source = new EventSource(here(`live?show=${show.join(',')}&bbox=${boxText(box)}`));
    source.onopen = () => on.status(true);
    for (const name of show) source.addEventListener(name, (event) => on[name](JSON.parse(event.data)));
    source.onerror = () => {
      on.status(false);
      if (source.readyState === EventSource.CLOSED) timer = setTimeout(connect, 3000 + 2000 * Math.random());
    };
  };
  const moved = () => {
    if (source && within(viewBox(map), box) && map.getZoom() - zoom < 2) return;
    clearTimeout(timer);
    timer = setTimeout(connect, 250);
  };
  map.on('moveend', moved);
  document.addEventListener('visibilitychange', () => (document.hidden ? close() : connect()));
  connect();
}
