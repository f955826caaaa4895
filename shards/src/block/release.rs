//! Releases of engines, as their version endpoints spell them.

use std::fmt;

/// A release of an engine. Post releases, release candidates and local builds count as the release they name: what
/// they changed is in no contract.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Release {
    /// First number.
    pub major: u16,
    /// Second number.
    pub minor: u16,
    /// Third number; 0 where it is not given.
    pub patch: u16,
}

impl Release {
    /// A release by its numbers.
    #[must_use]
    pub const fn new(major: u16, minor: u16, patch: u16) -> Self {
        Release { major, minor, patch }
    }

    /// Reads `0.32.0`, `v0.5.6.post2`, `0.11.1rc3+cu128`; none when it does not begin with two numbers.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let text = text.trim();
        let mut parts = text.strip_prefix('v').unwrap_or(text).splitn(3, '.');
        let major = parts.next()?.parse().ok()?;
        let minor = parts.next()?;
        let (minor, ends) = leading_number(minor)?;
        let patch = match parts.next() {
            Some(rest) if !ends => leading_number(rest).map_or(0, |(number, _)| number),
            _ => 0,
        };
        Some(Release { major, minor, patch })
    }
}

/// The number a text begins with, and whether something else follows it.
fn leading_number(text: &str) -> Option<(u16, bool)> {
    let digits = text.bytes().take_while(u8::is_ascii_digit).count();
    Some((text[..digits].parse().ok()?, digits < text.len()))
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_engines_spell_them() {
        let check = |text, expected: Option<(u16, u16, u16)>| {
            let parsed = Release::parse(text).map(|release| (release.major, release.minor, release.patch));
            assert_eq!(parsed, expected, "{text:?}");
        };
        check("0.32.0", Some((0, 32, 0)));
        check("v0.33.0", Some((0, 33, 0)));
        check("0.5.6.post2", Some((0, 5, 6)));
        check("0.4.6.post5", Some((0, 4, 6)));
        check("0.11.1rc3+cu128", Some((0, 11, 1)));
        check("0.31rc1", Some((0, 31, 0)));
        check("0.31rc1.7", Some((0, 31, 0)));
        check("1.2.dev4+gabcdef", Some((1, 2, 0)));
        check("1.2", Some((1, 2, 0)));
        check("dev", None);
        check("1", None);
        check("0.x.1", None);
        check("0.99999.1", None);
        check("", None);
    }

    #[test]
    fn releases_are_ordered_by_number_not_by_text() {
        assert!(Release::new(0, 9, 2) < Release::new(0, 10, 0));
        assert!(Release::new(0, 33, 0) < Release::new(1, 0, 0));
        assert_eq!(Release::new(0, 5, 23).to_string(), "0.5.23");
    }
}
