//! Giving way, cancelable operations, rings.
