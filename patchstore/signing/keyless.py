"""Sign without a key of one's own, through Sigstore: an identity of OpenID Connect, and a public log.

Needs the network for each version, and has not been tried: each signature asks Fulcio for a certificate, and
Rekor for an entry in its log, which publishes the identity, the time and the digest of the manifest.
"""

from pathlib import Path

from patchstore.errors import UsageError


class KeylessSigner:
    """Signs as the identity of a token. `model_signing verify sigstore` verifies these signatures.

    Readers of patchstore require keys, so they refuse versions that have no other signature.
    """

    name = "sigstore"

    def __init__(
        self, *, identity_token: str | None = None, staging: bool = False, trust_config: str | None = None
    ) -> None:
        """Prepare; the network is asked for the roots of trust.

        Args:
            identity_token: a token of OpenID Connect; None to look for the one of the environment, such as a
                CI job's, for each version.
            staging: whether to use Sigstore's staging instance.
            trust_config: a file that describes another instance of Sigstore.

        Raises:
            UsageError: the extra `sign` is not installed, or the file cannot be read.
        """
        try:
            from sigstore.models import ClientTrustConfig
            from sigstore.sign import SigningContext
        except ImportError as exc:
            raise UsageError(
                'signing without a key needs the package sigstore: pip install "patchstore[sign]"'
            ) from exc
        if trust_config is not None:
            try:
                config = ClientTrustConfig.from_json(Path(trust_config).read_text())
            except (OSError, ValueError) as exc:
                raise UsageError(f"the trust config {trust_config} cannot be used: {exc}") from exc
        else:
            config = ClientTrustConfig.staging() if staging else ClientTrustConfig.production()
        self._context = SigningContext.from_trust_config(config)
        self._token = identity_token

    def sign(self, statement: bytes) -> bytes:
        """Return a bundle with a certificate and an entry of the log.

        Raises:
            UsageError: there is no identity token.
        """
        from sigstore.dsse import Statement
        from sigstore.oidc import IdentityToken, detect_credential

        token = self._token or detect_credential()
        if token is None:
            raise UsageError("there is no identity token: give one, or run where the environment has one")
        with self._context.signer(IdentityToken(token)) as signer:
            return signer.sign_dsse(Statement(statement)).to_json().encode()
