//! Pinning a thread to a core.

use std::io;

/// Pins the calling thread to one core.
///
/// The kernel is asked directly: the core may be outside the mask the process inherited, as isolated cores are.
///
/// # Errors
/// What the kernel answered: the core is not online, not in the cpuset, or the number is beyond the mask.
pub fn pin_current(core: usize) -> io::Result<()> {
    if core >= libc::CPU_SETSIZE as usize {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("core {core} is beyond the {} cores an affinity mask can name", libc::CPU_SETSIZE),
        ));
    }
    // SAFETY: an all-zero cpu_set_t is the empty set.
    let mut set: libc::cpu_set_t = unsafe { std::mem::zeroed() };
    // SAFETY: `core` is below CPU_SETSIZE, checked above.
    unsafe { libc::CPU_SET(core, &mut set) };
    // SAFETY: the pointer is to a live set of exactly the size that is given; 0 names the calling thread.
    let result = unsafe { libc::sched_setaffinity(0, std::mem::size_of::<libc::cpu_set_t>(), &set) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_core_that_does_not_exist_is_an_error() {
        std::thread::spawn(|| {
            assert!(pin_current(libc::CPU_SETSIZE as usize).is_err());
            assert!(pin_current(libc::CPU_SETSIZE as usize - 1).is_err());
        })
        .join()
        .expect("the checks hold");
    }
}
