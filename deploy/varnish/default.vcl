vcl 4.1;

# The cache of compose.yaml.

backend origin {
    .host = "tiles";
    .port = "8788";
    .connect_timeout = 2s;
}

# Containers of the same network purge; its published port is bound to loopback.
acl purgers {
    "127.0.0.1";
    "::1";
    "10.0.0.0"/8;
    "172.16.0.0"/12;
    "192.168.0.0"/16;
}

include "/etc/varnish/rules.vcl";
