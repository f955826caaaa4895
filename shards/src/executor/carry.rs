//! The bytes that reads and writes may move between two visits to the driver.
//!
//! On a ring the kernel copies inside the visit itself, where no clock of the tasks sees it: sixteen bodies of a megabyte
//! that arrive at once would be copied in one visit. So long reads and writes ask here first, and those that come when
//! there is enough to carry wait for a later visit, first come first served.
//!
//! What is asked for counts when it is begun. A read that finds nothing yet is carried by a later visit, beside what that
//! one has: hence no read may be longer than [`READ_BYTES_MAX`], whatever room there is.

use std::cell::Cell;

use super::{Ticket, breathe, turn, visits};

/// Bytes carried between two visits, about: some 0.1 ms with the memory they are copied to. A single read or write goes
/// through whatever its length.
pub const CARRIED_BYTES_MAX: usize = 256 * 1024;
/// Longest read of a connection, bytes.
pub const READ_BYTES_MAX: usize = 64 * 1024;
/// Reads and writes up to so many bytes are not counted: they are those of neighbours.
pub const SHORT_BYTES_MAX: usize = 16 * 1024;

#[derive(Default)]
struct Carried {
    line: Ticket,
    visit: Cell<u64>,
    bytes: Cell<usize>,
}

thread_local! {
    static CARRIED: Carried = Carried::default();
}

/// Waits until a read or write of so many bytes may begin. Dropping it leaves the line.
pub async fn carry(bytes: usize) {
    breathe().await;
    if bytes <= SHORT_BYTES_MAX {
        return;
    }
    let line = CARRIED.with(|carried| carried.line.clone());
    let _first_in_line = line.take().await;
    while !CARRIED.with(|carried| carried.fits(bytes)) {
        turn().await;
    }
}

impl Carried {
    /// Counts the bytes, if they still fit into this visit.
    fn fits(&self, bytes: usize) -> bool {
        if self.visit.replace(visits()) != visits() {
            self.bytes.set(0);
        }
        let sum = self.bytes.get() + bytes;
        let fits = sum <= CARRIED_BYTES_MAX || self.bytes.get() == 0;
        if fits {
            self.bytes.set(sum);
        }
        fits
    }
}
