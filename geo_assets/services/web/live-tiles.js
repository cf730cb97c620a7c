// live-tiles: a map that shows an edit a moment after its tiles were committed, and loads nothing else again.
//
//   import { liveTiles } from 'https://tiles.example/live-tiles.js';
//   const live = liveTiles(map, { source: 'tiles', url: 'https://tiles.example/events' });
//
// No dependencies; works with maplibre-gl 6 (it needs map.refreshTiles). All tabs of a browser share one stream. Make the
// map with { zoomLevelsToOverscale: undefined }: else maplibre keeps what it cut out of tiles of the last zoom for ever.

const REMEMBERED = 20_000; // tiles whose revision is kept, and changes that wait to come into view
const ASKS = 5; // a change that a map does not take after so many is no longer waited for

const keyOf = ({ z, x, y }) => `${z}/${x}/${y}`;

/**
 * Hear the change stream, sharing one connection among all tabs of this browser.
 *
 * @param {string} url The tile server's /events, with filters if wanted (?bbox=, ?min_zoom=, ?max_zoom=).
 * @param {(message: {type: 'change'|'reset'|'open'|'wait', change?: object}) => void} listener
 * @param {string} [resume] Resume point, as in TileJSON's live.resume: nothing since then is missed.
 * @returns {{close: () => void}}
 */
export function openStream(url, listener, resume) {
  const name = `live-tiles ${url}`;
  // Web Locks elect the tab that connects; without them (plain http) every tab connects by itself.
  const shared = Boolean(navigator.locks && window.BroadcastChannel);
  const channel = shared ? new BroadcastChannel(name) : null;
  const leaving = new AbortController();
  let last = resume, source = null, status = 'wait', timer = 0, release = () => {};

  const hear = (message) => {
    last = message.id || last;
    if (message.type === 'open' || message.type === 'wait') status = message.type;
    if (message.type !== 'hello') listener(message);
  };
  const tell = (message) => { channel?.postMessage(message); hear(message); };
  const connect = () => {
    const target = new URL(url, location.href);
    if (last) target.searchParams.set('last_event_id', last);
    source = new EventSource(target);
    source.onopen = () => tell({ type: 'open' });
    source.onmessage = (event) => tell({ type: 'change', id: event.lastEventId, change: JSON.parse(event.data) });
    source.addEventListener('reset', (event) => tell({ type: 'reset', id: event.lastEventId }));
    source.onerror = () => {
      tell({ type: 'wait' });
      // The browser connects again by itself, with its last id, except after an answer that was no stream.
      if (source.readyState === EventSource.CLOSED) timer = setTimeout(connect, 3000 + 2000 * Math.random());
    };
  };
  if (shared) {
    channel.onmessage = ({ data }) => (data.type === 'hello' ? source && channel.postMessage({ type: status, id: last }) : hear(data));
    channel.postMessage({ type: 'hello' });
    const lead = () => new Promise((resolve) => { release = resolve; connect(); });
    navigator.locks.request(name, { signal: leaving.signal }, lead).catch(() => {});
  } else connect();
  return { close() { leaving.abort(); clearTimeout(timer); source?.close(); channel?.close(); release(); } };
}

/**
 * Keep a vector source of a map live: only tiles whose bytes changed are loaded again, old ones stay until then.
 *
 * @param {object} map A maplibre-gl map.
 * @param {object} options
 * @param {string} options.source Name of the vector source.
 * @param {string} options.url The tile server's /events.
 * @param {string} [options.resume] TileJSON's live.resume.
 * @param {(change: {z: number, x: number, y: number, hash: string|null, revision: number}) => void} [options.onChange] A tile changed.
 * @param {(tile: {z: number, x: number, y: number}) => void} [options.onRefresh] Its new bytes are on the map.
 * @param {() => void} [options.onReset] Everything is loaded again.
 * @param {(live: boolean) => void} [options.onStatus] The stream is open, or waits for its server.
 * @returns {{close: () => void}}
 */
export function liveTiles(map, { source, url, resume, onChange, onRefresh, onReset, onStatus }) {
  const known = new Map(); // key -> the newest change heard
  const pending = new Map(); // key -> a change that the map does not show yet
  const loading = new Set(); // keys whose first load is under way: those bytes may be the old ones
  let timer = 0, asked = -20, warned = false;

  const remember = (store, key, value) => {
    store.delete(key);
    store.set(key, value);
    if (store.size > REMEMBERED) store.delete(store.keys().next().value);
  };
  const lastZoom = () => map.getSource(source)?.maxzoom ?? 22;
  const inView = (z) => { // columns and rows of a zoom that the view covers
    const bounds = map.getBounds(), side = 2 ** z;
    const row = (lat) => ((1 - Math.asinh(Math.tan((Math.max(-85.05, Math.min(85.05, lat)) * Math.PI) / 180)) / Math.PI) / 2) * side;
    return { west: Math.floor(((bounds.getWest() + 180) / 360) * side), east: Math.floor(((bounds.getEast() + 180) / 360) * side),
      north: Math.floor(row(bounds.getNorth())), south: Math.floor(row(bounds.getSouth())), side };
  };
  const seen = ({ x, y }, { west, east, north, south, side }) => // a view may show several copies of the world
    y >= north && y <= south && (east - west >= side || ((x - west) % side + side) % side <= east - west);

  const ask = () => {
    timer = 0;
    asked = performance.now();
    if (!pending.size || !map.getSource(source)) return;
    const last = lastZoom(), zoom = Math.floor(map.getZoom()), views = new Map(), wanted = [];
    const view = (z) => views.get(z) ?? views.set(z, inView(z)).get(z);
    for (const [key, tile] of pending) {
      if (!seen(tile, view(tile.z))) continue;
      wanted.push(tile);
      if (tile.z === Math.min(zoom, last)) {
        tile.late = loading.has(key);
        if (++tile.asked >= ASKS) pending.delete(key);
      }
    }
    if (wanted.length) map.refreshTiles(source, wanted);
  };
  // The first change is asked for at once; of a burst, all that comes within 20 ms is one more call.
  const soon = () => { timer ||= setTimeout(ask, Math.max(0, asked + 20 - performance.now())); };

  const keyOfEvent = (event) => {
    const id = event.sourceId === source && event.tile?.tileID?.canonical;
    if (id && id.z > lastZoom() && !warned) {
      warned = true;
      console.warn(`live-tiles: beyond zoom ${lastZoom()} this map cuts tiles up and keeps the pieces; make it with { zoomLevelsToOverscale: undefined }`);
    }
    return id ? keyOf(id) : null;
  };
  const onLoading = (event) => { // a request that starts now brings at least what was announced before
    const key = keyOfEvent(event);
    if (key === null) return;
    loading.add(key);
    if (pending.delete(key)) onRefresh?.(known.get(key));
  };
  const onData = (event) => {
    const key = keyOfEvent(event);
    if (key === null) return;
    loading.delete(key);
    const tile = pending.get(key);
    if (!tile?.asked) return;
    if (tile.late) { tile.late = false; soon(); return; } // announced while it was loading: load it once more
    pending.delete(key);
    onRefresh?.(known.get(key));
  };
  const onError = (event) => { const key = keyOfEvent(event); if (key !== null) loading.delete(key); };

  const stream = openStream(url, (message) => {
    if (message.type === 'open' || message.type === 'wait') onStatus?.(message.type === 'open');
    if (message.type === 'reset') {
      known.clear();
      pending.clear();
      if (map.getSource(source)) map.refreshTiles(source); // all of them, and those kept out of view are forgotten
      onReset?.();
    }
    if (message.type !== 'change') return;
    const { change } = message, key = keyOf(change), before = known.get(key);
    const again = change.again && change.revision === before?.revision; // a cache may have given out old bytes
    if (before && change.revision <= before.revision && !again) return; // heard before
    remember(known, key, change);
    onChange?.(change);
    if (before && before.hash === change.hash && !again) return;
    remember(pending, key, { z: change.z, x: change.x, y: change.y, asked: 0, late: false });
    soon();
  }, resume);

  // Tiles that were out of view come back from maplibre's cache without asking the server: ask for them then.
  const heard = [['moveend', soon], ['idle', soon], ['sourcedataloading', onLoading], ['sourcedata', onData], ['error', onError]];
  for (const [type, listener] of heard) map.on(type, listener);
  return {
    close() {
      stream.close();
      clearTimeout(timer);
      for (const [type, listener] of heard) map.off(type, listener);
    },
  };
}
