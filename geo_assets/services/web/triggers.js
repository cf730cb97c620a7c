// The live list of triggers: the newest first, bounded; a click flies to the fence.

import { $, count, element } from './dom.js';

const SHOWN = 60;
export const TRIGGER_COLOURS = { ENTER: '#2f9e5f', DWELL: '#d08a1d', EXIT: '#c2455c' };

/** The list; `nameOf` gives a fence's name by its key. */
export function showTriggers({ nameOf, onClick }) {
  const list = $('triggers');
  let heard = 0, skipped = 0;
  const row = (trigger) => {
    const name = trigger.fence_name ?? nameOf(trigger.fence_id) ?? trigger.fence_id;
    const time = new Date(trigger.event_time_ms);
    const button = element('button', { type: 'button', title: `${trigger.fence_id}\n${trigger.device_id}, ${time.toISOString()}, number ${trigger.sequence}` },
      element('span', { className: `state ${trigger.state.toLowerCase()}`, textContent: trigger.state }),
      element('span', { className: 'what' }, element('b', { textContent: name }), element('small', { textContent: trigger.device_id })),
      element('time', { dateTime: time.toISOString(), textContent: time.toLocaleTimeString('en-GB') }));
    button.addEventListener('click', () => onClick(trigger));
    return element('li', { className: 'fresh' }, button);
  };
  return {
    add({ triggers, missed }) {
      heard += triggers.length + missed;
      skipped += missed;
      list.prepend(...triggers.slice(-SHOWN).reverse().map(row));
      while (list.children.length > SHOWN) list.lastChild.remove();
      $('triggers-count').textContent = count(heard);
      $('triggers-empty').hidden = heard > 0;
      $('triggers-missed').hidden = !skipped;
      $('triggers-missed').textContent = `${count(skipped)} more than a list can show`;
    },
  };
}
