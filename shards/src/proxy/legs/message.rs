//! What a leg is sent: the client's head with a few lines changed, and its body with members spliced in.

use super::leg::copy_head;
use super::{Errand, Task};
use crate::disagg::auth;
use crate::executor::breathe;
use crate::http::RequestBody;
use crate::ids::EndpointIndex;
use crate::prompt::{Piece, Splice};
use crate::proxy::outgoing::{ID_HEADER, push_line};

/// Bytes copied in one go: some ten microseconds.
const COPY_BYTES: usize = 128 * 1024;

/// Which leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Leg {
    /// Its answer is read here: it must be plain.
    Prefill,
    /// Its answer is the client's.
    Decode,
}

/// Makes a leg's request, with the edited body or as it came. `lines` are added to the head; an id among them stands for
/// the client's own.
pub async fn make(errand: &Errand<'_>, leg: Leg, body: Option<Splice<'_>>, lines: &[u8], own_id: bool) -> Vec<u8> {
    let request = errand.request();
    let (head, client_body) = request.bytes.split_at(request.head.len);
    let pieces = body.map_or_else(|| vec![Piece::Kept(0..client_body.len())], Splice::pieces);
    let lengths = pieces.iter().map(|piece| match piece {
        Piece::Kept(range) => range.len(),
        Piece::New(bytes) => bytes.len(),
    });
    let length: usize = lengths.sum();
    let mut skip = vec!["content-length", "transfer-encoding", "expect", auth::HEADER];
    if own_id {
        skip.push(ID_HEADER);
    }
    if leg == Leg::Prefill {
        skip.push("accept-encoding");
    }
    let mut added = lines.to_vec();
    if request.head.body != RequestBody::None || length > 0 {
        push_line(&mut added, "Content-Length", length);
    }
    let mut out = Vec::with_capacity(head.len() + added.len() + length);
    copy_head(head, &request.head.dropped, &skip, &added, &mut out);
    for piece in &pieces {
        let bytes = match piece {
            Piece::Kept(range) => &client_body[range.clone()],
            Piece::New(bytes) => bytes,
        };
        for (number, part) in bytes.chunks(COPY_BYTES).enumerate() {
            if number > 0 {
                breathe().await;
            }
            out.extend_from_slice(part);
        }
    }
    out
}

impl Task<'_, '_> {
    /// The id that both legs have, where it is not the client's own.
    pub(super) fn id(&self, prefill: EndpointIndex, decode: EndpointIndex) -> Option<String> {
        use crate::disagg::{Dialect, nixl};
        let errand = self.errand;
        let (prefill, decode) = (errand.endpoint(prefill), errand.endpoint(decode));
        let is_nixl = matches!(self.dialect, Dialect::NixlPull | Dialect::NixlPush);
        let made = || errand.request().made_id.clone();
        if !is_nixl {
            return made();
        }
        if prefill.nixl_port != 0 && self.dialect == Dialect::NixlPull {
            let unique = made().unwrap_or_else(|| errand.proxy().request_ids.next());
            return Some(nixl::addressed_id(prefill.address, prefill.nixl_port, decode.address, &unique));
        }
        match self.dialect {
            // A push is waited for under the id: it must be nobody else's.
            Dialect::NixlPush => Some(errand.proxy().request_ids.next()),
            _ => made(),
        }
    }
}
