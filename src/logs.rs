//! The log: to standard error, with a level that can be changed while the process runs.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use tracing_subscriber::EnvFilter;

/// Has panics told in the log: where, and their text where it stands in the program. One that was put together may quote a
/// prompt: a cut inside a character tells the whole text.
pub fn tell_panics() {
    std::panic::set_hook(Box::new(|panic| {
        let text = panic.payload().downcast_ref::<&'static str>();
        let text = text.copied().unwrap_or("its text may quote a request and is not told");
        let thread = std::thread::current().name().unwrap_or("-").to_owned();
        let at = panic.location().map(ToString::to_string);
        let trace = std::backtrace::Backtrace::capture();
        let trace = (trace.status() == std::backtrace::BacktraceStatus::Captured).then(|| trace.to_string());
        tracing::error!(thread, at, text, trace, "panic");
    }));
}

/// Changes what is logged; none of it for a process whose log is another's.
#[derive(Clone, Default)]
pub struct LogSwitch {
    set: Option<Arc<SetFilter>>,
    now: Arc<Mutex<String>>,
}

type SetFilter = dyn Fn(EnvFilter) -> Result<(), String> + Send + Sync;

impl fmt::Debug for LogSwitch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LogSwitch").field("now", &self.level()).finish_non_exhaustive()
    }
}

/// Why the level stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// It is no level and no filter.
    #[error(
        "{0:?} is no level (error, warning, info, debug, trace) and no filter such as \"info,kvlane::ingest=debug\""
    )]
    Unknown(String),
    /// The log is not this process's own.
    #[error("the log's level cannot be changed here: {0}")]
    Fixed(String),
}

impl LogSwitch {
    /// Begins to log what `filter` says, or the environment's `RUST_LOG` where it is set.
    #[must_use]
    pub fn start(filter: &str) -> Self {
        let from_env = EnvFilter::try_from_default_env().ok();
        let text = from_env.as_ref().map_or_else(|| filter.to_owned(), ToString::to_string);
        let builder = tracing_subscriber::fmt()
            .with_env_filter(from_env.unwrap_or_else(|| EnvFilter::new(filter)))
            .with_writer(std::io::stderr)
            .with_filter_reloading();
        let handle = builder.reload_handle();
        // A program that embeds the gateway may have its own subscriber already.
        let ours = builder.try_init().is_ok();
        let set = move |filter| handle.reload(filter).map_err(|error| error.to_string());
        let set: Option<Arc<SetFilter>> = if ours { Some(Arc::new(set)) } else { None };
        LogSwitch { set, now: Arc::new(Mutex::new(text)) }
    }

    /// What is logged, as it was set.
    #[must_use]
    pub fn level(&self) -> String {
        self.now.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Logs what a level or a filter says from now on. Names of syslog's levels are understood as well.
    ///
    /// # Errors
    /// [`LogError`]; nothing was changed.
    pub fn set(&self, text: &str) -> Result<(), LogError> {
        let level = match text.to_ascii_lowercase().as_str() {
            "warning" | "notice" => "warn".to_owned(),
            "critical" | "alert" | "emergency" => "error".to_owned(),
            _ => text.to_owned(),
        };
        let unknown = || LogError::Unknown(text.to_owned());
        // A word alone is read as the name of a target that is logged whole: certainly not what was meant.
        let is_level = level.parse::<tracing::Level>().is_ok() || level.eq_ignore_ascii_case("off");
        if !is_level && !level.contains(['=', ',']) {
            return Err(unknown());
        }
        let filter = level.parse().map_err(|_| unknown())?;
        let Some(set) = &self.set else { return Err(LogError::Fixed("another program's log is in use".to_owned())) };
        set(filter).map_err(LogError::Fixed)?;
        *self.now.lock().unwrap_or_else(PoisonError::into_inner) = text.to_owned();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_level_is_refused_before_anything_is_changed() {
        let switch = LogSwitch::default();
        for text in ["", "loud", "info,=", "kvlane=loud"] {
            assert!(matches!(switch.set(text), Err(LogError::Unknown(_))), "{text:?}");
        }
        assert!(matches!(switch.set("debug"), Err(LogError::Fixed(_))));
    }
}
