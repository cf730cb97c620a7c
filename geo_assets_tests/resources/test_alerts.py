"""Both adapters of alerts: the log, and webhooks that a real server on loopback takes."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st

from geo_assets.events.signature import SignatureError, Verifier, new_secret
from geo_assets.ports import open_alerts
from geo_assets.settings import Settings
from geo_assets_tests.own_redis import free_port
from geo_assets_tests.waiting import patient
from geo_assets_tests.webhook import Webhook, webhook
from resources.alerts import bodies
from resources.alerts.http import HttpAlerts
from resources.alerts.log import LogAlerts
from resources.alerts.protocol import Alert, Alerts, AlertsMisconfigured, Failing, Message, NotDelivered

CHECK = Alert(
    key="check:tiles/integrity:12012",
    status="firing",
    severity="error",
    kind="check",
    name="tiles/integrity",
    summary="7 of 900 objects are gone <or damaged> & built again",
    region="120120211",
    count=7,
    failing=tuple(
        Failing(f"14:1201202110131{n}", "its object is gone", f"http://tiles/#14/60.1/24.{n}") for n in "0123"
    ),
    url="http://dagster/assets/tiles?view=checks&checkDetail=integrity",
    map_url="http://tiles/#9/60.1/24.9",
    since_ms=1_700_000_000_000,
    at_ms=1_700_000_060_000,
)
OVER = Alert("run:audit:9f", "resolved", "warning", "run", "audit", "runs succeed again", since_ms=1, at_ms=2)
MESSAGE = Message("alert_0123456789abcdef", 1_700_000_061_000, (CHECK, OVER))


@pytest.fixture
def receiver() -> Iterator[Webhook]:
    with webhook() as made:
        yield made


# -- what both promise ---------------------------------------------------------------------------------------------


@pytest.fixture(params=["log", "http"])
def adapter(request: pytest.FixtureRequest, receiver: Webhook) -> Iterator[Alerts]:
    made: Alerts = LogAlerts() if request.param == "log" else HttpAlerts([receiver.url])
    yield made
    made.close()


@pytest.fixture(autouse=True)
def every_level() -> Iterator[None]:
    """Whatever level a test before this one chose for its process: each line is seen."""
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(0))
    yield
    structlog.configure(**before)


def test_an_adapter_is_one_and_names_its_channels_always_alike(adapter: Alerts) -> None:
    assert isinstance(adapter, Alerts)
    assert len(adapter.channels) == 1
    assert adapter.channels == adapter.channels


def test_what_was_sent_twice_is_two_deliveries_of_one_id(adapter: Alerts, receiver: Webhook) -> None:
    with structlog.testing.capture_logs() as lines:
        for _ in range(2):
            adapter.send(adapter.channels[0], MESSAGE)
    ids = [line["message"] for line in lines if line["event"] == "alert"][::2] or [
        body["id"] for body in receiver.bodies
    ]
    assert ids == [MESSAGE.id] * 2


def test_an_unknown_channel_is_an_error(adapter: Alerts) -> None:
    with pytest.raises(KeyError):
        adapter.send("nobody", MESSAGE)


# -- the log -------------------------------------------------------------------------------------------------------


def test_the_log_says_each_alert_at_its_own_level() -> None:
    with structlog.testing.capture_logs() as lines:
        LogAlerts().send("log", MESSAGE)
    assert [(line["log_level"], line["name"], line["status"]) for line in lines] == [
        ("error", "tiles/integrity", "firing"),
        ("info", "audit", "resolved"),
    ]
    assert lines[0]["failing"] == [one.subject for one in CHECK.failing]


# -- webhooks ------------------------------------------------------------------------------------------------------


def test_a_body_says_everything(receiver: Webhook) -> None:
    alerts = HttpAlerts([receiver.url])
    alerts.send(alerts.channels[0], MESSAGE)
    ((path, headers, body),) = receiver.requests
    assert path == "/hooks/T0/SECRET"
    assert headers["content-type"] == "application/json"
    assert headers["idempotency-key"] == MESSAGE.id
    assert "webhook-signature" not in headers
    said = json.loads(body)
    assert said["title"] == "1 failing, 1 recovered: tiles/integrity"
    assert said["alerts"][0]["failing"][0] == {
        "subject": "14:12012021101310",
        "problem": "its object is gone",
        "map_url": "http://tiles/#14/60.1/24.0",
    }
    assert (said["alerts"][0]["since"], said["alerts"][0]["at"]) == (
        "2023-11-14T22:13:20.000Z", "2023-11-14T22:14:20.000Z"
    )  # fmt: skip


def test_a_signed_body_is_one_that_the_edge_s_verifier_takes(receiver: Webhook) -> None:
    secret = new_secret()
    alerts = open_alerts(Settings(alert_webhook_urls=receiver.url, alert_webhook_secret=secret))  # type: ignore[arg-type]
    alerts.send(alerts.channels[0], MESSAGE)
    ((_, headers, body),) = receiver.requests
    verifier = Verifier(headers, [secret], time.time())
    verifier.update(body)
    assert verifier.finish().webhook_id == MESSAGE.id
    verifier = Verifier(headers, [new_secret()], time.time())
    verifier.update(body)
    with pytest.raises(SignatureError):
        verifier.finish()


@pytest.mark.parametrize("status", [300, 301, 400, 404, 410, 429, 500, 503])
def test_any_answer_but_2xx_is_not_delivered(receiver: Webhook, status: int) -> None:
    alerts = HttpAlerts([receiver.url])
    receiver.status, receiver.headers = status, {"Location": "/elsewhere"}
    with pytest.raises(NotDelivered, match=f"it answered {status}"):
        alerts.send(alerts.channels[0], MESSAGE)
    assert len(receiver.requests) == 1, "no redirect is followed, and nothing is tried again here"


@pytest.mark.parametrize(
    ("text", "wait_s"),
    [("30", 30.0), ("Tue, 14 Nov 2023 22:14:20 GMT", 60.0), ("Tue, 14 Nov 2000 22:14:20 GMT", 0.0),
     ("99999999", 3_600.0), ("soon", 0.0), ("-1", 0.0)],
)  # fmt: skip
def test_a_receiver_may_ask_to_be_left_alone_for_a_while(receiver: Webhook, text: str, wait_s: float) -> None:
    alerts = HttpAlerts([receiver.url], clock=lambda: 1_700_000_000.0)
    receiver.status, receiver.headers = 429, {"Retry-After": text}
    with pytest.raises(NotDelivered) as refused:
        alerts.send(alerts.channels[0], MESSAGE)
    assert refused.value.retry_after_s == wait_s


def _slow(receiver: Webhook) -> None:
    receiver.slow_s = 3.0


def _dripping(receiver: Webhook) -> None:
    receiver.drips = True


@pytest.mark.parametrize("how", [_slow, _dripping])
def test_a_receiver_that_does_not_answer_holds_up_nobody(receiver: Webhook, how: Callable[[Webhook], None]) -> None:
    how(receiver)
    alerts = HttpAlerts([receiver.url], timeout_s=0.4)
    began = time.monotonic()
    with pytest.raises(NotDelivered, match=r"within 0\.4 s|ReadTimeout"):
        alerts.send(alerts.channels[0], MESSAGE)
    assert time.monotonic() - began < patient(10)


def test_no_name_and_no_fault_shows_the_secrets_of_an_address() -> None:
    port = free_port()
    alerts = HttpAlerts([f"http://me:PASSWORD@127.0.0.1:{port}/hooks/SECRET?token=TOKEN"])
    (channel,) = alerts.channels
    with pytest.raises(NotDelivered) as refused:
        alerts.send(channel, MESSAGE)
    assert channel.startswith(f"127.0.0.1:{port}#")
    assert str(refused.value) == f"{channel}: ConnectError: Connection refused"


def test_two_hooks_of_one_host_are_two_channels(receiver: Webhook) -> None:
    alerts = HttpAlerts([receiver.url, f"{receiver.url}2"])
    first, second = alerts.channels
    assert first != second
    alerts.send(second, MESSAGE)
    assert [path for path, _, _ in receiver.requests] == ["/hooks/T0/SECRET2"]


def test_user_and_password_go_into_basic_authentication(receiver: Webhook) -> None:
    alerts = HttpAlerts([receiver.url.replace("http://", "http://me:p%40ss@")])
    alerts.send(alerts.channels[0], MESSAGE)
    assert receiver.requests[0][1]["authorization"] == "Basic bWU6cEBzcw=="


def test_what_is_no_webhook_is_refused_without_being_shown() -> None:
    for urls in ([], ["ftp://me:PASSWORD@host"], ["http://"]):
        with pytest.raises(AlertsMisconfigured, match="GEO_ASSETS_ALERT_WEBHOOK_URLS") as refused:
            HttpAlerts(urls)
        assert "PASSWORD" not in str(refused.value)
    with pytest.raises(AlertsMisconfigured, match="GEO_ASSETS_ALERT_FORMAT"):
        HttpAlerts(["http://host"], format="carrier pigeon")


@pytest.mark.parametrize(
    "value", ["ftp://host/", "https://me:PASSWORD/x@host/", "https://", "host/PASSWORD", "https://host/a b"]
)
def test_the_setting_refuses_what_is_no_address_and_does_not_repeat_it(value: str) -> None:
    with pytest.raises(ValueError, match="GEO_ASSETS_ALERT_WEBHOOK_URLS") as refused:
        Settings(alert_webhook_urls=value)  # type: ignore[arg-type]
    assert "PASSWORD" not in str(refused.value)
    assert "PASSWORD" not in repr(Settings(alert_webhook_urls="https://me:PASSWORD@host/PASSWORD"))  # type: ignore[arg-type]


def test_a_secret_that_signs_nothing_is_refused_at_start() -> None:
    with pytest.raises(ValueError, match="GEO_ASSETS_ALERT_WEBHOOK_SECRET: a plain secret has 5 characters"):
        Settings(alert_webhook_secret="short")  # type: ignore[arg-type]


def test_without_an_address_alerts_are_lines_of_the_log() -> None:
    assert isinstance(open_alerts(Settings()), LogAlerts)


# -- formats -------------------------------------------------------------------------------------------------------


def test_the_format_goes_by_the_address_unless_it_is_said() -> None:
    assert bodies.format_of("auto", "hooks.slack.com", "/services/T/B/x") == "slack"
    assert bodies.format_of("auto", "alertmanager", "/api/v2/alerts") == "alertmanager"
    assert bodies.format_of("auto", "my.example", "/hook") == "json"
    assert bodies.format_of("slack", "mattermost.example", "/hooks/x") == "slack"


def test_slack_s_body_is_within_its_limits_and_escapes_what_it_gives_a_meaning(receiver: Webhook) -> None:
    alerts = HttpAlerts([receiver.url], format="slack")
    alerts.send(alerts.channels[0], MESSAGE)
    (body,) = receiver.bodies
    text = body["blocks"][0]["text"]["text"]
    assert body["text"] == "1 failing, 1 recovered: tiles/integrity"
    assert "<http://dagster/assets/tiles?view=checks&checkDetail=integrity|Error: check tiles/integrity fails" in text
    assert "are gone &lt;or damaged&gt; &amp; built again" in text
    assert "<http://tiles/#14/60.1/24.0|14:12012021101310> its object is gone" in text
    assert "and 3 more" in text


ALERT = st.builds(
    Alert,
    key=st.text(min_size=1, max_size=20),
    status=st.sampled_from(["firing", "resolved"]),
    severity=st.sampled_from(["error", "warning"]),
    kind=st.sampled_from(["check", "run"]),
    name=st.text(min_size=1, max_size=20),
    summary=st.text(max_size=400),
    count=st.integers(0, 10**6),
    failing=st.lists(st.builds(Failing, st.text(max_size=80), st.text(max_size=400)), max_size=5).map(tuple),
    since_ms=st.integers(0, 2**41),
    at_ms=st.integers(0, 2**41),
)


@given(
    st.builds(Message, st.just("alert_0"), st.integers(0, 2**41), st.lists(ALERT, min_size=1, max_size=60).map(tuple))
)
@settings(max_examples=30, deadline=None)
def test_any_message_has_a_body_of_every_format_within_its_limits(message: Message) -> None:
    said = bodies.slack(message)
    assert len(said["blocks"]) <= 50
    assert all(0 < len(block["text"]["text"]) <= 3_000 for block in said["blocks"] if block["type"] == "section")
    for name in ("json", "alertmanager", "slack"):
        json.loads(bodies.body_of(name, "/api/v2/alerts", message))
        json.loads(bodies.body_of(name, "/hook", message))


def test_alertmanager_s_own_address_takes_a_list_in_which_a_firing_alert_does_not_end_by_itself(
    receiver: Webhook,
) -> None:
    alerts = HttpAlerts([f"http://{receiver.place}/api/v2/alerts"])
    alerts.send(alerts.channels[0], MESSAGE)
    (posted,) = receiver.bodies
    firing, other, over, _ = posted
    assert firing["labels"] == {
        "alertname": "tiles_integrity", "service": "geo_assets", "kind": "check", "name": "tiles/integrity",
        "key": CHECK.key, "severity": "critical",
    }  # fmt: skip
    assert firing["startsAt"] == "2023-11-14T22:13:20.000Z"
    assert firing["endsAt"] == "2023-12-14T22:14:21.000Z"
    # One that was a warning before is not left standing.
    assert other["labels"] == {**firing["labels"], "severity": "warning"}
    assert other["endsAt"] == bodies.moment(CHECK.at_ms)
    assert over["endsAt"] == bodies.moment(OVER.at_ms)


def test_other_addresses_get_what_alertmanager_sends_to_webhooks(receiver: Webhook) -> None:
    alerts = HttpAlerts([receiver.url], format="alertmanager")
    alerts.send(alerts.channels[0], MESSAGE)
    (body,) = receiver.bodies
    assert (body["version"], body["status"], len(body["alerts"])) == ("4", "firing", 2)
    assert {alert["status"] for alert in body["alerts"]} == {"firing", "resolved"}
    assert body["alerts"][0]["endsAt"] == "0001-01-01T00:00:00Z"
    assert body["commonLabels"] == {"service": "geo_assets"}
    assert body["alerts"][0]["annotations"]["map"] == CHECK.map_url
