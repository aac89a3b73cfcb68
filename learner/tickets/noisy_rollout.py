"""NoisyRollout's images: a prompt's own, distorted for some of its trajectories, less and less as a run goes on."""

from __future__ import annotations

from collections.abc import Mapping

from asyncrl.config.algorithm import NoisyRolloutConfig
from asyncrl.data.images import content_hash
from asyncrl.data.noisy_images import annealing, noisy_image
from asyncrl.data.prompts import RenderedPrompt
from asyncrl.journal.writer import TicketSlot


def noisy_images(
    rendered: RenderedPrompt, slot: TicketSlot, settings: NoisyRolloutConfig, *, seed: int, total_steps: int
) -> Mapping[str, bytes]:
    """Distort the images of a prompt, in order; by content hash. Nothing without images, or where no noise is left.

    Of settings, seed, prompt and slot alone: a ticket that is written again is the same.
    """
    steps = int(settings.steps * annealing(settings, slot.version / total_steps))
    if not (settings.rows and steps):
        return {}
    prompt = rendered.prompt
    made = [
        noisy_image(rendered.blobs[digest], steps, (seed, slot.ticket_id, number), f"row {prompt.row_id}")
        for number, digest in enumerate(prompt.image_hashes)
    ]
    return {content_hash(data): data for data in made}
