//! Heap bytes in use, counted at the allocator: what the process is charged, not what the data structures say.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static IN_USE: AtomicUsize = AtomicUsize::new(0);

struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// What the system's allocator takes for a block: a word of its own, in steps of two words, at least four.
fn charged(bytes: usize) -> usize {
    (bytes + 8).next_multiple_of(16).max(32)
}

// SAFETY: every call is handed to the system's allocator unchanged; only a counter is kept beside it.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        IN_USE.fetch_add(charged(layout.size()), Ordering::Relaxed);
        // SAFETY: the caller's promises for this call are the ones `System` asks for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        IN_USE.fetch_sub(charged(layout.size()), Ordering::Relaxed);
        // SAFETY: the pointer came from `System` through `alloc` or `realloc`, with this layout.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        IN_USE.fetch_add(charged(size), Ordering::Relaxed);
        IN_USE.fetch_sub(charged(layout.size()), Ordering::Relaxed);
        // SAFETY: the pointer came from `System`, with this layout; the new size is the caller's promise.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

/// Heap bytes in use by the whole process.
pub fn in_use() -> usize {
    IN_USE.load(Ordering::Relaxed)
}

#[cfg(test)]
mod tests {
    #[test]
    fn a_large_allocation_is_seen_while_it_lives() {
        // Other tests allocate too, but not this much.
        const BYTES: usize = 1 << 30;
        let before = super::in_use();
        let block: Vec<u8> = Vec::with_capacity(BYTES);
        assert!(super::in_use() >= before + BYTES / 2);
        drop(block);
        assert!(super::in_use() < before + BYTES / 2);
    }
}
