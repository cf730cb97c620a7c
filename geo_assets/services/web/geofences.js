// Fences, devices, triggers and drawing, joined: who hears of what, and what a click on the map means to them.

import { showDevices } from './devices.js';
import { $, card } from './dom.js';
import { drawing } from './draw.js';
import { boundsOfFence, fenceCard, showFences } from './fences.js';
import { openLive } from './live.js';
import { TRIGGER_COLOURS, showTriggers } from './triggers.js';

/** Put them on the map, by what the server shows and takes. */
export function showGeofences(map, config, Popup) {
  let devices = null, draw = null;
  const fences = showFences(map, { onChange() { devices?.fencesChanged(); draw?.fencesChanged(); } });
  devices = config.devices ? showDevices(map, fences.at) : null;
  const triggers = config.devices && showTriggers({
    nameOf: (key) => fences.get(key)?.properties.name,
    onClick(trigger) {
      const known = fences.get(trigger.fence_id);
      if (known) map.fitBounds(boundsOfFence(known), { padding: { top: 60, bottom: 60, right: 60, left: innerWidth > 700 ? 340 : 60 }, maxZoom: 17 });
      else if (trigger.fence_at) map.flyTo({ center: trigger.fence_at, zoom: Math.max(14, map.getZoom()) });
      fences.pulse(trigger.fence_id);
    },
  });
  $('draw-box').hidden = !config.draw;
  $('fences-empty-draw').hidden = !config.draw;
  if (config.draw) draw = drawing(map, { fences });
  for (const name of ['devices-layer', 'triggers-layer']) $(name).hidden = !config.devices;
  $('devices-off').hidden = config.devices;
  if (!config.devices) { $('triggers-tab').hidden = true; showTab('changes'); }

  const bind = (name, apply) => { $(`${name}-toggle`).addEventListener('change', (event) => apply(event.target.checked)); };
  bind('fences', fences.show);
  bind('devices', (on) => devices?.show(on));
  let heard = true;
  bind('triggers', (on) => { heard = on; $('triggers').hidden = !on; });
  openLive(map, config.devices ? ['fences', 'devices', 'triggers'] : ['fences'], {
    status: (on) => { document.body.dataset.live = on ? 'open' : 'wait'; },
    box: (box) => devices?.box(box),
    fences: fences.changed,
    devices: (told) => devices.update(told),
    triggers(told) {
      triggers.add(told);
      if (!heard) return;
      const now = Date.now();
      for (const trigger of told.triggers) {
        if (now - trigger.event_time_ms > 60_000) continue; // told again to a page that was just opened
        fences.pulse(trigger.fence_id);
        devices.ring(trigger.device_id, TRIGGER_COLOURS[trigger.state]);
      }
    },
  });

  const popup = (lngLat, content) => new Popup({ maxWidth: '320px', focusAfterOpen: false }).setLngLat(lngLat).setDOMContent(content).addTo(map);
  return {
    busy: () => Boolean(draw?.active),
    /** Whether a click was meant for a device or a fence; it is answered then. */
    click(event) {
      const device = devices?.at(event.point);
      if (device) {
        const names = device.fences.map((key) => fences.get(key)?.properties.name ?? key).join(', ');
        popup([device.lng, device.lat], card(device.id, 'device', { 'last fix': new Date(device.time).toLocaleTimeString('en-GB'), in: names || 'no fence' }));
        return true;
      }
      const box = [[event.point.x - 4, event.point.y - 4], [event.point.x + 4, event.point.y + 4]];
      const found = map.queryRenderedFeatures(box, { layers: ['geofences-edge', 'geofences-label'] })[0] ?? map.queryRenderedFeatures(event.point, { layers: ['geofences-fill'] })[0];
      const fence = found && fences.get(found.properties.key);
      if (!fence) return false;
      const shown = popup(event.lngLat, fenceCard(fence, { draws: config.draw, drawSource: config.draw_source,
        onEdit(feature) { shown.remove(); draw.edit(feature); } }));
      return true;
    },
  };
}

export function showTab(name) {
  for (const one of ['triggers', 'changes']) {
    $(`${one}-tab`).setAttribute('aria-selected', String(one === name));
    $(`${one}-box`).hidden = one !== name;
  }
}
