//! One client connection, request by request: route, forward, relay, watch.
