# What a cache in front of the tile server does; included after a backend `origin` and an acl `purgers`.
# Start varnishd with -p default_ttl=0 -p default_grace=0 -p default_keep=0: without Cache-Control nothing is kept.

sub vcl_recv {
    # A purge names the site as a browser does (Host), so that Varnish's own key, path with query and host, finds it.
    if (req.method == "PURGE") {
        if (client.ip !~ purgers) {
            return (synth(405, "Purging is not allowed from here"));
        }
        return (purge);
    }
    if (req.method != "GET" && req.method != "HEAD") {
        return (pass);
    }
    # A stream of events never ends and is nobody else's.
    if (req.http.Accept ~ "text/event-stream") {
        return (pass);
    }
    unset req.http.Cookie;
    # A bare question mark is no query, and a purge does not have it.
    set req.url = regsub(req.url, "\?$", "");
    return (hash);
}

sub vcl_backend_response {
    # What the origin says, and not a moment longer, whatever stale-while-revalidate would allow.
    set beresp.grace = 0s;
    set beresp.keep = 0s;
}

sub vcl_deliver {
    if (obj.hits > 0) {
        set resp.http.X-Cache = "HIT";
    } else {
        set resp.http.X-Cache = "MISS";
    }
}
