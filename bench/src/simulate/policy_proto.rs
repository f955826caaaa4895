//! proto
use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use shards::block::{Contract, FIXED_SEED, HashAlgo, NoneHash};
use shards::ids::{EndpointIndex, ServiceId};
use shards::inventory;
use shards::load::LoadSlot;
use shards::service::{Endpoint, EndpointShared, Engine, KvExact, MediumWeights, Select, Service, ServiceShared};
use shards::rates::{Terms, FirstByte};
use super::fleet::{Fleet, SHARD};

pub struct Choice { pub worker: usize, pub hit_tokens: u64, pub spilled: bool, pub seeded: bool }
pub struct Policy { pub kind: String, pub next: usize, pub p: Vec<f64>, pub per: Vec<Terms>, last: Vec<f64>, count: Vec<u32>, run: Vec<i32>, decs: Vec<u32>, rho: f64, nbar: f64, pub fac: Vec<f32>, n: usize }
impl Drop for Policy { fn drop(&mut self) { if std::env::var("DBG").is_ok() && self.kind == "ttftr" { for w in [0,1,2,3,63] { println!("   {:?} n {} fac {}", self.per[w], self.count[w], self.fac[w]) } } } }
impl Policy {
    pub fn new(kind: &str, p: &[f64]) -> Self { Policy { kind: kind.into(), next: 0, p: p.to_vec(), per: vec![Terms { start: 0.02, per_token: 1e-4, per_token_decoding: 1e-6 }; 64], last: vec![0.0; 64], count: vec![0; 64], run: vec![0; 64], decs: vec![0; 64], rho: 0.0, nbar: 0.0, fac: vec![1.0; 64], n: 8 } }
    pub fn pools_caches(&self) -> bool { self.kind == "oracle" }
    pub fn service(&self, workers: u16, _bt: u32) -> Service {
        let (_, inventory) = inventory::new(&inventory::Options { blocks_expected: 1 });
        let kv = KvExact {
            block_tokens: 16,
            contract: Contract::vllm(NoneHash::from_seed(HashAlgo::Sha256Cbor, FIXED_SEED)),
            algo_given: true, other_forms: Vec::new(), weights: MediumWeights::default(), adapters: HashMap::new(),
            chat_template: None, chat_template_kwargs: None, add_bos: None, engine_render: None,
            min_match_tokens: 16, spill_relief: false, mean_load_factor: 175, seed_every: 16, seed_min_blocks: 16, zero_hit_every: 50, inventory };
        let endpoint = |index: u16| {
            let shared = EndpointShared::new(EndpointIndex(index), LoadSlot(u32::from(index)), 1);
            shared.kv_blocks.store(1_000, Ordering::Relaxed);
            Endpoint { address: ([127, 0, 0, 1], 9_000 + index).into(), dns_name: None, weight: 1, backup: false, retired: false, shared: Arc::new(shared) }
        };
        Service { id: ServiceId(0), name: String::new(), listen: ([127, 0, 0, 1], 8_000).into(), host: None, path: None, model: None,
            select: Select::RoundRobin, engine: Engine::Vllm, kv: Some(kv), endpoints: (0..workers).map(endpoint).collect(), shared: Arc::new(ServiceShared::new(1)) }
    }
    pub fn learn(&mut self, w: usize, a: FirstByte, now: f64) { let m = self.p.first().copied().unwrap_or(0.0); 
        if m == 0.0 || m == 3.0 { self.learn_at(w, a, now, w) } else if m == 2.0 { self.learn_at(w, a, now, 63) } else if m == 4.0 { self.learn4(w, a, now) } }

    fn learn4(&mut self, w: usize, a: FirstByte, _now: f64) {
        if a.ahead.prefill > 0 { return }
        let dt = a.elapsed.as_secs_f32();
        let work = a.uncached_tokens as f32 * (1.0 + a.ahead.decode as f32 / 1024.0);
        let t = &mut self.per[63];
        let parts = [t.start, work * t.per_token];
        let p: f32 = parts.iter().sum();
        self.count[63] += 1; self.count[w] += 1;
        let s = if dt > p { 1.0f32 } else { -1.0 };
        let g = (8.0 / (16.0 + self.count[63] as f32)).max(1.0 / 64.0);
        t.start = (t.start * (s * g * parts[0] / p).exp()).clamp(0.001, 0.1); t.per_token *= (s * g * parts[1] / p).exp();
        let later = dt > p * self.fac[w];
        let run = &mut self.run[w]; if (*run > 0) == later { *run += run.signum() } else { *run = if later { 1 } else { -1 } }
        let mut g = 1.0f32 / 32.0;
        if run.abs() > 4 { g = (g * (1 << ((run.abs() - 4) / 2).min(3)) as f32).min(0.25) }
        let s = if later { 1.0f32 } else { -1.0 };
        self.fac[w] = (self.fac[w] * (s * g).exp()).clamp(0.05, 20.0);
    }
    fn learn_at(&mut self, w: usize, a: FirstByte, now: f64, to: usize) {
        let sent = now - a.elapsed.as_secs_f64();
        let dt = (now - sent.max(self.last[w])) as f32; self.last[w] = now;
        let q = self.p.get(5).copied().unwrap_or(0.5) as f32; let t = &mut self.per[to]; let n = &mut self.count[to]; *n += 1;
        let (work, d) = (a.uncached_tokens as f32, self.decs[w] as f32);
        let parts = [t.start, work * t.per_token, work * d * t.per_token_decoding];
        let p: f32 = parts.iter().sum(); let later = dt > p;
        let run = &mut self.run[to]; if (*run > 0) == later { *run += run.signum() } else { *run = if later { 1 } else { -1 } }
        let s = if later { 2.0 * q } else { -2.0 * (1.0 - q) };
        let mut g = (2.0 / (4.0 + *n as f32)).max(1.0 / 64.0);
        if run.abs() > 5 { g = (g * (1 << ((run.abs() - 5) / 2).min(4)) as f32).min(0.5) }
        t.start = (t.start * (s * g * parts[0] / p).exp()).clamp(0.001, self.p.get(6).copied().unwrap_or(0.1) as f32); t.per_token *= (s * g * parts[1] / p).exp(); t.per_token_decoding *= (s * g * parts[2] / p).exp();
    }
    pub fn choose(&mut self, f: &Fleet, number: usize, now: f64) -> Choice {
        let n = f.workers.len();
        let t = f.trace(); let path = t.path(number); let r = &t.requests[number];
        self.next += 1;
        let bt = u64::from(t.block_tokens);
        let cap = |b: u32| (u64::from(b) * bt).min(u64::from(r.tokens) - 1);
        let hit = |w: usize| cap(f.views[w].matched(&t.prefixes, path));
        let claim = |w: usize| cap(f.views[w].claimed(&t.prefixes, path, now));
        let load = |w: usize| f.loads.seen_by(SHARD, LoadSlot(w as u32));
        let start = self.next;
        let argmin = |c: &dyn Fn(usize) -> f64| { let mut b = (f64::INFINITY, 0); for k in 0..n { let w = (k + start) % n; let x = c(w); if x < b.0 { b = (x, w) } } b.1 };
        let w = match self.kind.as_str() {
            "rr" => self.next % n,
            "lc" => argmin(&|w| f64::from(load(w).requests())),
            "lt" => argmin(&|w| load(w).tokens as f64 + 1e-3*f64::from(load(w).requests())),
            "session" => { let mut x = r.session.wrapping_mul(0x9e3779b97f4a7c15); x ^= x >> 29; x = x.wrapping_mul(0xbf58476d1ce4e5b9); ((u128::from(x) * n as u128) >> 64) as usize }
            "longest" => { argmin(&|w| -(hit(w) as f64) + 1e-6 * f64::from(load(w).requests())) }
            "hard" => { // bounded among holders, cap 1.75
                let hs: Vec<usize> = (0..n).filter(|w| hit(*w) > 0).collect();
                if hs.is_empty() { self.next % n } else {
                let tot: u32 = hs.iter().map(|w| load(*w).requests()).sum();
                let capn = (175 * tot as u64).div_ceil(100 * hs.len() as u64).max(1);
                let below: Vec<usize> = hs.iter().copied().filter(|w| u64::from(load(*w).requests()) < capn).collect();
                let key = |w: usize| if below.contains(&w) { -(hit(w) as f64) + 1e-6 * f64::from(load(w).requests()) } else { 1e18 + f64::from(load(w).requests()) };
                argmin(&key) } }
            "oracle" => argmin(&|w| { let e = &f.workers[w]; (e.engine.work_left() + e.work_in_line) / e.engine.factor * (1.0 + 0.005 * load(w).decode as f64) }),
            "true" => argmin(&|w| { let e = &f.workers[w]; let h = cap(f.cache_of(w).matched(&t.prefixes, path)); (e.engine.work_left() + e.work_in_line + (u64::from(r.tokens) - h) as f64) * (1.0 + 0.005 * load(w).decode as f64) }),
            "ttft" => {
                let evict = self.p.first().copied().unwrap_or(0.0);
                let useclaim = self.p.get(1).copied().unwrap_or(1.0) > 0.0;
                let dec = self.p.get(2).copied().unwrap_or(0.0);
                argmin(&|w| {
                    let l = load(w);
                    let terms = f.service.endpoints[w].shared.rates.terms();
                    let h = if useclaim { claim(w) } else { hit(w) };
                    let un = u64::from(r.tokens) - h;
                    let s = f64::from(terms.seconds(l.tokens + un, l.decode));
                    s + evict * un as f64 * f64::from(terms.per_token) + dec * f64::from(l.decode)
                })
            }
            "ttftr" => {
                // p0 mode: 0 learned, 1 fixed; p1 kind of weight 0 const 1: 1/(1-rho) 2: 1+nbar inst 3: 1+nbar ewma; p2 scale; p3 cap; p4 dec tokens
                let g = |i: usize, d: f64| self.p.get(i).copied().unwrap_or(d);
                let busy = (0..n).filter(|w| load(*w).prefill > 0).count() as f64 / n as f64;
                let fac = self.fac.clone(); let per = self.per.clone(); let _ = (&fac, &per); let nb = (0..n).map(|w| f64::from(load(w).prefill)).sum::<f64>() / n as f64;
                self.rho += (busy - self.rho) / 64.0; self.nbar += (nb - self.nbar) / 64.0;
                let weight = match g(1, 0.0) as u32 { 0 => g(2, 1.0), 1 => (1.0 / (1.0 - self.rho).max(1e-3)) * g(2, 1.0), 2 => 1.0 + nb * g(2, 1.0), _ => 1.0 + self.nbar * g(2, 1.0) }.clamp(1.0, g(3, 50.0));
                let mode = g(0, 0.0); let dec = g(4, 0.0);
                for w in 0..n { self.decs[w] = load(w).decode; }
                
                let dead = g(5, 0.3); let share = g(6, 1024.0); self.n = n;
                argmin(&|w| {
                    let l = load(w); let un = u64::from(r.tokens) - claim(w);
                    let t = if mode == 0.0 { per[w] } else if mode == 2.0 { per[63] } else { Terms { start: 0.02, per_token: 1e-4, per_token_decoding: 1e-7 } };
                    if mode == 4.0 { let t = per[63]; let phi = f64::from(fac[w]); let phi = if phi.ln().abs() < dead { 1.0 } else { phi };
                        let d = f64::from(l.decode); let pt = f64::from(t.per_token);
                        return phi * (f64::from(t.start) * f64::from(l.prefill + 1) + pt * ((l.tokens as f64 + un as f64) * (1.0 + d / share) + (weight - 1.0) * un as f64)) + dec * d * pt; }
                    let pt = f64::from(t.per_token + t.per_token_decoding * l.decode as f32);
                    f64::from(t.start) * f64::from(l.prefill + 1) + (l.tokens as f64 + dec * f64::from(l.decode) + weight * un as f64) * pt
                })
            }
            "ttftq" => { // without learned rates: tokens only
                let un_w = self.p[0]; let d = self.p[1];
                argmin(&|w| { let l = load(w); let un = (u64::from(r.tokens) - claim(w)) as f64; l.tokens as f64 + un_w * un + d * f64::from(l.decode) })
            }
            _ => panic!("{}", self.kind),
        };
        
        Choice { worker: w, hit_tokens: hit(w), spilled: false, seeded: false }
    }
}
