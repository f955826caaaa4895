//! HTTP/1.1 heads and bodies, both ways.
