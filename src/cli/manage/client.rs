//! Requests of the command line to a gateway's management API, in clear or over TLS.

use std::io::{self, Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use clap::{Args, ValueEnum};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring, verify_tls12_signature, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use rustls::{ClientConfig, ClientConnection, DigitallySignedStruct, RootCertStore, SignatureScheme, StreamOwned};
use serde_json::Value;
use shards::http::reply::complete;

use crate::access::certificates;

use super::Ended;

/// Largest answer, bytes: an inventory of several million keys. A longer one is an error.
const ANSWER_BYTES_MAX: u64 = 512 << 20;
/// Where systems keep the certificates of public authorities.
const SYSTEM_ROOTS: &str = "/etc/ssl/certs/ca-certificates.crt";

/// Where the gateway is, and how to be let in.
#[derive(Clone, Debug, Args)]
pub(in crate::cli) struct ServerArgs {
    /// Host of the management API.
    #[arg(short = 's', long, value_name = "HOST", default_value = "127.0.0.1", global = true)]
    apiserver: String,
    /// Port of the management API.
    #[arg(short, long, default_value_t = 11111, global = true)]
    port: u16,
    /// Longest silence of the gateway, seconds.
    #[arg(short, long, value_name = "SECONDS", default_value_t = 10, global = true)]
    timeout: u64,
    /// How to talk to it.
    #[arg(long, value_enum, default_value_t = Protocol::Http, global = true)]
    protocol: Protocol,
    #[command(flatten)]
    credentials: Credentials,
}

/// How to be let in, and how to know that it is the gateway.
#[derive(Clone, Debug, Default, Args)]
pub(in crate::cli) struct Credentials {
    /// Token to show; others on this host can see it: prefer --token-file.
    #[arg(long, global = true)]
    token: Option<String>,
    /// File that holds the token.
    #[arg(long, value_name = "FILE", global = true)]
    token_file: Option<PathBuf>,
    /// Send the token behind the word "Bearer", or bare.
    #[arg(long, value_name = "BOOL", default_value_t = true, action = clap::ArgAction::Set, num_args = 0..=1,
          require_equals = true, default_missing_value = "true", global = true)]
    bearer: bool,
    /// PEM file with the authority that signed the gateway's certificate.
    #[arg(long, value_name = "FILE", global = true)]
    cacert: Option<PathBuf>,
    /// Take any certificate: whoever is in between can read and change everything.
    #[arg(short = 'k', long, global = true)]
    insecure: bool,
}

impl Credentials {
    /// What a request shows of who asks.
    fn authorization(&self) -> Result<Option<String>, Ended> {
        let token = match (&self.token, &self.token_file) {
            (Some(token), _) => Some(token.clone()),
            (None, Some(path)) => Some(read_token(path)?),
            (None, None) => None,
        };
        let token = token.filter(|token| !token.is_empty());
        Ok(token.map(|token| if self.bearer { format!("Bearer {token}") } else { token }))
    }

    fn tls(&self) -> Result<Arc<ClientConfig>, Ended> {
        tls_config(self.cacert.as_deref(), self.insecure)
    }
}

/// How to talk to the gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Protocol {
    /// In clear.
    Http,
    /// Over TLS.
    Https,
}

/// A gateway's management API.
#[derive(Debug)]
pub(in crate::cli) struct Client {
    host: String,
    port: u16,
    timeout: Duration,
    authorization: Option<String>,
    tls: Option<Arc<ClientConfig>>,
}

trait Wire: Read + Write {}
impl<T: Read + Write> Wire for T {}

impl Client {
    pub(super) fn new(args: &ServerArgs) -> Result<Self, Ended> {
        let credentials = &args.credentials;
        let tls = args.protocol == Protocol::Https || credentials.cacert.is_some();
        Ok(Client {
            host: args.apiserver.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port: args.port,
            timeout: Duration::from_secs(args.timeout.max(1)),
            authorization: credentials.authorization()?,
            tls: if tls { Some(credentials.tls()?) } else { None },
        })
    }

    /// A gateway by its address: `http://HOST:PORT`, `https://HOST:PORT`, or without a scheme, which is TLS where an
    /// authority is given.
    pub(in crate::cli) fn at(url: &str, credentials: &Credentials) -> Result<Self, Ended> {
        let (tls, rest) = match url.split_once("://") {
            Some(("https", rest)) => (true, rest),
            Some(("http", rest)) => (false, rest),
            Some(_) => (false, ""),
            None => (credentials.cacert.is_some(), url),
        };
        let parts =
            rest.trim_end_matches('/').rsplit_once(':').and_then(|(host, port)| Some((host, port.parse().ok()?)));
        let (host, port) = parts
            .filter(|(host, _)| !host.is_empty() && !host.contains('/'))
            .ok_or_else(|| Ended::Usage(format!("{url}: expected something like http://127.0.0.1:11111")))?;
        Ok(Client {
            host: host.trim_start_matches('[').trim_end_matches(']').to_owned(),
            port,
            timeout: Duration::from_secs(10),
            authorization: credentials.authorization()?,
            tls: if tls { Some(credentials.tls()?) } else { None },
        })
    }

    /// Asks for a path under the base and understands the answer.
    pub(in crate::cli) fn ask(&self, method: &str, path: &str, body: Option<&Value>) -> Result<Value, Ended> {
        let at = || format!("{}:{}", self.host, self.port);
        let answer = self.exchange(method, path, body).map_err(|why| {
            let why = why.to_string();
            let hint = if why.contains("certificate") { ": --cacert FILE names who signed it" } else { "" };
            Ended::Unavailable(format!("no gateway answers at {}: {why}{hint}", at()))
        })?;
        let reply = complete(&answer, true).ok().flatten();
        let reply = reply.ok_or_else(|| {
            let hint = if self.tls.is_none() { ": if it speaks TLS, say --protocol https" } else { "" };
            Ended::Contract(format!("{} answers something that is no HTTP{hint}", at()))
        })?;
        let value: Option<Value> = serde_json::from_slice(&reply.body).ok();
        let what = value.as_ref().map_or_else(|| String::from_utf8_lossy(&reply.body).into_owned(), text_of);
        match reply.status {
            200 => value.ok_or_else(|| Ended::Contract(format!("{} answers something that is no JSON", at()))),
            401 if self.authorization.is_none() => Err(Ended::Access(format!("{what} (--token-file FILE)"))),
            401 | 403 => Err(Ended::Access(what)),
            429 | 503 => Err(Ended::Unavailable(what)),
            _ => Err(Ended::Failed(what)),
        }
    }

    fn exchange(&self, method: &str, path: &str, body: Option<&Value>) -> io::Result<Vec<u8>> {
        let mut stream = self.connect()?;
        let body = body.map(Value::to_string).unwrap_or_default();
        let authorization = self.authorization.as_ref().map(|a| format!("Authorization: {a}\r\n")).unwrap_or_default();
        let host = if self.host.contains(':') { format!("[{}]", self.host) } else { self.host.clone() };
        let length = if body.is_empty() { String::new() } else { format!("Content-Length: {}\r\n", body.len()) };
        // In one piece: whoever answers before the last of several has closed by then.
        let request = format!(
            "{method} /netlox/v1{path} HTTP/1.1\r\nHost: {host}:{}\r\nContent-Type: application/json\r\n\
             {authorization}{length}Connection: close\r\n\r\n{body}",
            self.port
        );
        stream.write_all(request.as_bytes())?;
        let mut answer = Vec::new();
        match stream.take(ANSWER_BYTES_MAX).read_to_end(&mut answer) {
            // A server that ends TLS without saying so; what it sent tells whether it is whole.
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof && !answer.is_empty() => Ok(answer),
            Err(error) => Err(error),
            Ok(_) => Ok(answer),
        }
    }

    fn connect(&self) -> io::Result<Box<dyn Wire>> {
        let mut last = io::Error::other("the name has no address");
        for address in (self.host.as_str(), self.port).to_socket_addrs()? {
            match TcpStream::connect_timeout(&address, self.timeout) {
                Ok(stream) => {
                    stream.set_read_timeout(Some(self.timeout))?;
                    stream.set_write_timeout(Some(self.timeout))?;
                    return self.secure(stream);
                }
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    fn secure(&self, stream: TcpStream) -> io::Result<Box<dyn Wire>> {
        let Some(config) = &self.tls else { return Ok(Box::new(stream)) };
        let name = ServerName::try_from(self.host.clone()).map_err(io::Error::other)?;
        let session = ClientConnection::new(Arc::clone(config), name).map_err(io::Error::other)?;
        Ok(Box::new(StreamOwned::new(session, stream)))
    }
}

/// What an answer says, in the members that clients of the reference look at.
fn text_of(value: &Value) -> String {
    let named = |name: &str| value.get(name).and_then(Value::as_str).filter(|text| !text.is_empty());
    match (named("message"), named("result")) {
        (Some(message), Some(result)) => format!("{message}: {result}"),
        (Some(text), None) | (None, Some(text)) => text.to_owned(),
        (None, None) => named("error").or_else(|| named("msg")).map_or_else(|| value.to_string(), str::to_owned),
    }
}

fn read_token(path: &Path) -> Result<String, Ended> {
    let text = std::fs::read_to_string(path);
    let text = text.map_err(|why| Ended::Usage(format!("--token-file {}: {why}", path.display())))?;
    Ok(text.trim().to_owned())
}

fn tls_config(cacert: Option<&Path>, insecure: bool) -> Result<Arc<ClientConfig>, Ended> {
    let provider = Arc::new(ring::default_provider());
    let builder = ClientConfig::builder_with_provider(Arc::clone(&provider))
        .with_safe_default_protocol_versions()
        .map_err(|why| Ended::Usage(why.to_string()))?;
    let config = if insecure {
        builder.dangerous().with_custom_certificate_verifier(Arc::new(AnyCertificate(provider))).with_no_client_auth()
    } else {
        builder.with_root_certificates(roots(cacert)?).with_no_client_auth()
    };
    Ok(Arc::new(config))
}

fn roots(file: Option<&Path>) -> Result<RootCertStore, Ended> {
    let mut roots = RootCertStore::empty();
    let known = certificates(file.unwrap_or(Path::new(SYSTEM_ROOTS)));
    let known = known.map_err(|why| Ended::Usage(format!("--cacert: {why}")))?;
    let (added, _) = roots.add_parsable_certificates(known);
    if added == 0 {
        return Err(Ended::Usage("--cacert: the file holds no certificate".to_owned()));
    }
    Ok(roots)
}

/// Takes any certificate (`--insecure`); what is signed with it is looked at all the same.
#[derive(Debug)]
struct AnyCertificate(Arc<CryptoProvider>);

impl ServerCertVerifier for AnyCertificate {
    fn verify_server_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls12_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signature: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signature, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}
