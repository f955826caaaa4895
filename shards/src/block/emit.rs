//! The values a preimage is made of, whatever their serialisation.

/// Receives the values of one preimage in order. Tuples are bracketed by [`open`](Emit::open) and
/// [`close`](Emit::close), both with the number of elements: CBOR writes it first, pickle last.
pub(super) trait Emit {
    /// Python's `None`.
    fn none(&mut self);
    /// An integer.
    fn int(&mut self, value: i64);
    /// An integer without sign: an adapter's id, or a link of vLLM's 64-bit chain.
    fn uint(&mut self, value: u64);
    /// A digest.
    fn bytes(&mut self, value: &[u8]);
    /// A text that came from outside.
    fn text(&mut self, value: &str);
    /// A literal of the engine's code: one object, however often it occurs.
    fn tag(&mut self, value: &'static str);
    /// Begins a tuple of `len` elements.
    fn open(&mut self, len: usize);
    /// Ends a tuple of `len` elements.
    fn close(&mut self, len: usize);
}

/// Something that is serialised: what it is made of, in order.
pub(super) trait Value {
    /// Gives the parts to `out`.
    fn write(&self, out: &mut impl Emit);
}

impl Value for &str {
    fn write(&self, out: &mut impl Emit) {
        out.text(self);
    }
}
