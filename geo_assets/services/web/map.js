// The map page: the map, what changed, what is covered, and what a feature says. All text from data goes in as text.

import { $, NOTHING, boxText, card, element, fetchJson, here, viewBox } from './dom.js';
import { showGeofences, showTab } from './geofences.js';
import { showHeat, showWaiting } from './heat.js';
import { liveTiles } from './live-tiles.js';

const SOURCE = 'tiles';
const SHOWN_CHANGES = 30;
const STATES = {
  present: ['built', '#4fa36b'],
  dirty: ['waiting', '#e7a72f'],
  failed: ['failed', '#d1495b'],
  empty: ['empty', '#b9c2cc'],
  never: ['never built', '#ffffff'],
};
function notice(text, command) {
  $('notice').replaceChildren(text, ...(command ? [element('code', { textContent: command })] : []));
  $('notice').hidden = false;
}

// -- tiles -----------------------------------------------------------------------------------------------------------
const latitude = (row, side) => (Math.atan(Math.sinh(Math.PI * (1 - (2 * row) / side))) * 180) / Math.PI;

function boundsOf({ z, x, y }) {
  const side = 2 ** z;
  return [(x / side) * 360 - 180, latitude(y + 1, side), ((x + 1) / side) * 360 - 180, latitude(y, side)];
}

function squareOf(tile, properties) {
  const [west, south, east, north] = boundsOf(tile);
  const ring = [[west, south], [east, south], [east, north], [west, north], [west, south]];
  return { type: 'Feature', properties, geometry: { type: 'Polygon', coordinates: [ring] } };
}

function keyOf({ z, x, y }) {
  let quadkey = '';
  for (let bit = z - 1; bit >= 0; bit--) quadkey += ((x >> bit) & 1) | (((y >> bit) & 1) << 1);
  return `${z}:${quadkey}`;
}

function tileAt({ lng, lat }, z) {
  const side = 2 ** z, clamp = (value) => Math.max(0, Math.min(side - 1, Math.floor(value)));
  const sine = Math.asinh(Math.tan((Math.max(-85.05, Math.min(85.05, lat)) * Math.PI) / 180));
  return { z, x: clamp(((lng + 180) / 360) * side), y: clamp(((1 - sine / Math.PI) / 2) * side) };
}

// -- the page --------------------------------------------------------------------------------------------------------
async function start() {
  const [config, tilejson, style] = await Promise.all(['page.json', 'tiles.json', 'style.json'].map(fetchJson));
  const dagster = (tile) => `${config.dagster_url}/assets/tiles?view=partitions&partition=${encodeURIComponent(keyOf(tile))}`;
  $('dagster').href = `${config.dagster_url}/assets/tiles?view=partitions`;
  if (!config.maplibre) {
    $('badge-text').textContent = 'no map';
    notice('The map library is not installed. In the project’s folder run ', config.install);
    return;
  }
  const { Map: MapLibreMap, NavigationControl, ScaleControl, AttributionControl, Popup, setWorkerUrl } = await import('./vendor/maplibre-gl.mjs');
  setWorkerUrl(here('vendor/maplibre-gl-worker.mjs'));

  // The page's own server, whatever its public name is.
  style.layers = style.layers.filter((layer) => !config.fence_layers.includes(layer['source-layer'])); // drawn as they judge
  style.sources[SOURCE].tiles = [here('tiles/') + '{z}/{x}/{y}.mvt'];
  const map = new MapLibreMap({
    container: 'map',
    style,
    hash: true,
    center: tilejson.center.slice(0, 2),
    zoom: Math.max(1, tilejson.center[2]),
    maxZoom: 22,
    zoomLevelsToOverscale: undefined, // what maplibre cuts out of a tile of the last zoom it would never load again
    attributionControl: false,
    localIdeographFontFamily: 'sans-serif',
  });
  map.addControl(new NavigationControl({ visualizePitch: true }), 'top-right');
  map.addControl(new ScaleControl({ maxWidth: 120 }), 'bottom-left');
  map.addControl(new AttributionControl({ compact: false }), 'bottom-right');
  if (!tilejson.live.published) notice('There are no tiles yet. Load some data: ', 'geo-assets import FILE');

  const tileZoom = () => Math.max(0, Math.min(tilejson.maxzoom, Math.floor(map.getZoom())));
  const showPosition = () => { $('position').textContent = `zoom ${map.getZoom().toFixed(1)}`; };
  map.on('zoom', showPosition);
  showPosition();

  map.on('load', () => {
    map.addSource('coverage', { type: 'geojson', data: NOTHING });
    map.addSource('flash', { type: 'geojson', data: NOTHING });
    const colour = ['match', ['get', 'state'], ...Object.entries(STATES).flatMap(([state, [, value]]) => [state, value]), '#ffffff'];
    map.addLayer({ id: 'coverage-fill', type: 'fill', source: 'coverage',
      paint: { 'fill-color': colour, 'fill-opacity': ['match', ['get', 'state'], 'present', 0.16, 0.42] } });
    map.addLayer({ id: 'coverage-edge', type: 'line', source: 'coverage',
      paint: { 'line-color': ['match', ['get', 'state'], 'never', '#a9a197', colour], 'line-width': 1.2 } });
    map.addLayer({ id: 'coverage-label', type: 'symbol', source: 'coverage',
      layout: { 'text-field': ['get', 'label'], 'text-font': ['sans-serif'], 'text-size': 11, 'text-allow-overlap': true },
      paint: { 'text-color': '#33302c', 'text-halo-color': 'rgba(255,255,255,0.9)', 'text-halo-width': 1.4 } });
    map.addLayer({ id: 'flash-fill', type: 'fill', source: 'flash', paint: { 'fill-color': '#2f9e5f', 'fill-opacity': 0.1 } });
    map.addLayer({ id: 'flash-edge', type: 'line', source: 'flash', paint: { 'line-color': '#2f9e5f', 'line-width': 2, 'line-opacity': 0.8 } });
    showCoverage(map, tilejson, tileZoom, Popup, dagster);
    showHeat(map, Popup);
    showWaiting(map, Popup);
    showFeatures(map, tilejson, tileZoom, Popup, dagster, showGeofences(map, config, Popup));
  });

  showChanges(map, tilejson, tileZoom);
  map.on('error', (event) => console.warn('map:', event.error?.message ?? event));
  window.geoAssets = { map };
}

function showPanel() {
  for (const name of ['triggers', 'changes']) $(`${name}-tab`).addEventListener('click', () => showTab(name));
  const fold = (folded) => { $('panel').classList.toggle('folded', folded); $('fold').setAttribute('aria-expanded', String(!folded)); };
  $('fold').addEventListener('click', () => fold(!$('panel').classList.contains('folded')));
  if (matchMedia('(max-width: 560px)').matches) fold(true);
}

function showChanges(map, tilejson, tileZoom) {
  let refreshed = 0;
  const flashing = new Map();
  const drawFlashes = () => map.getSource('flash')?.setData({ type: 'FeatureCollection', features: [...flashing.values()] });
  const flash = (tile) => {
    if (tile.z !== tileZoom()) return;
    const key = keyOf(tile);
    flashing.set(key, squareOf(tile, {}));
    drawFlashes();
    setTimeout(() => { flashing.delete(key); drawFlashes(); }, 1600);
  };
  const list = (change) => {
    const hash = change.hash ? change.hash.slice(0, 8) : 'emptied';
    const button = element('button', { type: 'button', title: `${keyOf(change)}\n${change.hash ?? 'emptied'}` },
      element('span', { textContent: `${change.z}/${change.x}/${change.y}` }),
      element('span', { className: 'hash', textContent: hash }),
      element('span', { className: 'revision', textContent: `r${change.revision}` }));
    button.addEventListener('click', () => {
      const [west, south, east, north] = boundsOf(change);
      map.flyTo({ center: [(west + east) / 2, (south + north) / 2], zoom: change.z + 0.4 });
    });
    $('changes').prepend(element('li', { className: 'fresh' }, button));
    while ($('changes').children.length > SHOWN_CHANGES) $('changes').lastChild.remove();
    $('changes-empty').hidden = true;
  };
  liveTiles(map, {
    source: SOURCE,
    url: here('events'),
    resume: tilejson.live.resume,
    onStatus(live) {
      $('badge').dataset.live = live ? 'open' : 'wait';
      $('badge-text').textContent = live ? 'live' : 'reconnecting';
    },
    onChange(change) {
      if (change.hash) $('notice').hidden = true; // that there are no tiles yet, if anything
      list(change);
      map.fire('tilechange', { change });
    },
    onRefresh(tile) {
      $('refreshed').textContent = ++refreshed;
      $('refreshed-word').textContent = refreshed === 1 ? 'tile refreshed' : 'tiles refreshed';
      flash(tile);
    },
    onReset() { $('changes').replaceChildren(); },
  });
}

function showCoverage(map, tilejson, tileZoom, Popup, dagster) {
  let timer = 0, turn = 0;
  const on = () => $('coverage-toggle').checked;
  const draw = async () => {
    const mine = ++turn;
    if (!on()) { map.getSource('coverage').setData(NOTHING); $('legend').hidden = true; return; }
    const zoom = tileZoom();
    let covered;
    try { covered = await fetchJson(`coverage?bbox=${boxText(viewBox(map))}&zoom=${zoom}`); } catch (error) { console.warn(error); return; }
    if (mine !== turn) return; // the view moved on
    map.getSource('coverage').setData({ type: 'FeatureCollection', features: covered.tiles.map((tile) => squareOf({ z: covered.zoom, ...tile },
      { ...tile, z: covered.zoom, label: `${covered.zoom}/${tile.x}/${tile.y}` + (tile.revision ? `\nr${tile.revision}` : '') })) });
    $('legend').replaceChildren(...Object.entries(STATES).map(([state, [word]]) => element('li', {},
      element('i', { className: `state-${state}` }), word, element('b', { textContent: covered.counts[state] ?? 0 }))));
    $('legend').hidden = false;
  };
  const later = () => { clearTimeout(timer); timer = setTimeout(draw, 150); };
  $('coverage-toggle').addEventListener('change', draw);
  map.on('moveend', () => on() && later());
  map.on('tilechange', () => on() && later());
  setInterval(() => on() && !document.hidden && later(), 5000); // what waits or failed is not announced
  map.on('click', 'coverage-fill', (event) => {
    if (!$('fence-form').hidden) return;
    const tile = event.features[0].properties;
    const rows = { state: STATES[tile.state][0], revision: tile.revision || null, bytes: tile.bytes || null,
      built: tile.built_at_ms ? new Date(tile.built_at_ms).toLocaleString() : null, error: tile.error };
    new Popup({ maxWidth: '320px', focusAfterOpen: false }).setLngLat(event.lngLat).setDOMContent(card(`${tile.z}/${tile.x}/${tile.y}`, tile.key, rows, linksOf(tile, dagster))).addTo(map);
  });
  if (on()) draw();
}

function showFeatures(map, tilejson, tileZoom, Popup, dagster, geofences) {
  const near = (point) => map.queryRenderedFeatures([[point.x - 3, point.y - 3], [point.x + 3, point.y + 3]]).filter((f) => f.source === SOURCE);
  let looked = 0;
  map.on('mousemove', (event) => {
    if (geofences.busy() || event.originalEvent.timeStamp - looked < 60) return;
    looked = event.originalEvent.timeStamp;
    map.getCanvas().style.cursor = near(event.point).length ? 'pointer' : '';
  });
  map.on('click', (event) => {
    if (geofences.busy() || geofences.click(event) || $('coverage-toggle').checked) return;
    const feature = near(event.point)[0];
    if (!feature) return;
    const { name, _id, ...rest } = feature.properties; // _id: an id that is no 64-bit integer
    const rows = { id: feature.id ?? _id, ...rest };
    const title = name || [rest.street, rest.housenumber].filter(Boolean).join(' ') || `${feature.sourceLayer} ${rows.id ?? ''}`;
    const tile = tileAt(event.lngLat, tileZoom());
    new Popup({ maxWidth: '320px', focusAfterOpen: false }).setLngLat(event.lngLat)
      .setDOMContent(card(title, feature.sourceLayer, rows, linksOf(tile, dagster))).addTo(map);
  });
}

const linksOf = (tile, dagster) => element('div', { className: 'links' }, element('span', { textContent: `tile ${tile.z}/${tile.x}/${tile.y}` }),
  element('a', { href: dagster(tile), target: '_blank', rel: 'noopener', textContent: 'in Dagster' }));

showPanel();
start().catch((error) => {
  console.error(error);
  $('badge-text').textContent = 'no map';
  notice(`The map could not start: ${error.message}`);
});
