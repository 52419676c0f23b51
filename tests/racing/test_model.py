"""The model of a race finds what made the data, is unmoved by slow runs, and draws what it believes."""

from itertools import product

import numpy as np
import pytest

from vitsweep.racing import model as model_module
from vitsweep.racing.model import Design, Floats, Mixture, Model, Posterior, Runs, Scales, _around

LEVELS = list(product("ab", "cd", "efg"))
DESIGN = Design.of([dict(zip("xyz", level, strict=True)) for level in LEVELS])


def truth(random: np.random.Generator) -> Floats:
    """A fast `b`, a slow `d`, and nothing else but a little of each cell."""
    fast = np.array([0.2 * (x == "b") - 0.1 * (y == "d") for x, y, _ in LEVELS])
    return fast + random.normal(0, 0.005, len(LEVELS))


def measured(mu: Floats, num_blocks: int, random: np.random.Generator, noise: float = 0.02) -> Runs:
    """Blocks of six random cells, each with a level of its own and a slow first run."""
    rows = []
    for block in range(num_blocks):
        level = random.normal(5, 0.3)
        for place, cell in enumerate(random.permutation(len(mu))[:6]):
            log = mu[cell] + level + random.normal(0, noise) - 0.06 * (place == 0)
            rows.append((cell, block, float(place == 0), log))
    cell, block, first, log = map(np.array, zip(*rows, strict=True))
    return Runs(cell, block, first, log)


def test_keys_that_divide_cells_alike_or_not_at_all_are_one_factor_or_none() -> None:
    settings = [{"a": x, "b": x + "2", "c": "same", "d": y} for x, y in product("pq", "rst")]
    design = Design.of(settings)
    assert (design.num_main, design.num_pairs) == (1 + 2, 2)
    assert design.levels.shape == (6, 2)


def test_contrasts_of_a_full_grid_are_orthogonal_and_of_mean_square_one() -> None:
    cells = np.arange(len(LEVELS))
    columns = np.c_[np.ones(len(LEVELS)), DESIGN.main(cells), DESIGN.pairs(cells)]
    assert np.allclose(columns.T @ columns / len(LEVELS), np.eye(columns.shape[1]))


def test_differences_between_cells_are_found_across_blocks_and_cold_first_runs() -> None:
    random = np.random.default_rng(1)
    mu = truth(random)
    found = Model(DESIGN).posterior(measured(mu, 12, random)).mean
    assert np.abs((found - found.mean()) - (mu - mu.mean())).max() < 0.02


def test_a_few_runs_far_off_hardly_move_the_estimate_and_are_named() -> None:
    random = np.random.default_rng(2)
    mu = truth(random)
    runs = measured(mu, 12, random)
    slow = np.zeros(len(runs), bool)
    slow[[7, 20, 33, 50]] = True
    spoilt = Model(DESIGN).posterior(Runs(runs.cell, runs.block, runs.first, runs.log - 0.4 * slow))
    clean = Model(DESIGN).posterior(runs)
    assert np.abs(np.diff(spoilt.mean - clean.mean)).max() < 0.03
    assert set(np.argsort(spoilt.weights)[:4]) == {7, 20, 33, 50}
    assert clean.weights.min() > spoilt.weights.min()


def test_draws_have_the_mean_and_the_covariance_of_the_exact_posterior() -> None:
    """Against the textbook formula with the whole covariance matrix of cells and runs."""
    random = np.random.default_rng(3)
    runs, scales = measured(truth(random), 5, random), Scales()
    posterior = Posterior(DESIGN, runs, scales)
    cells = np.arange(len(LEVELS))
    draws = posterior.draws(20_000, random)(cells)
    main, pairs = DESIGN.main(cells), DESIGN.pairs(cells)
    kernel = (
        scales.main**2 * main @ main.T
        + scales.pairs**2 * pairs @ pairs.T
        + scales.residual**2 * np.eye(len(cells))
    )
    at_runs = kernel[np.ix_(runs.cell, runs.cell)] + np.diag(scales.noise**2 / posterior._used)
    at_runs += model_module.BLOCK_SD**2 * (runs.block[:, None] == runs.block[None])
    at_runs += model_module.COLD_SD**2 * np.outer(runs.first, runs.first)
    gain = kernel[:, runs.cell] @ np.linalg.inv(at_runs)
    assert np.allclose(posterior.mean, gain @ (runs.log - runs.log.mean()))
    assert np.abs(draws.mean(axis=1) - posterior.mean).max() < 0.003
    exact = kernel - gain @ kernel[runs.cell]
    assert np.abs(np.cov(draws) - exact).max() < 0.05 * exact.diagonal().max()


def test_cells_are_judged_alike_in_one_chunk_and_in_many(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(4)
    runs = measured(truth(random), 5, random)
    whole = Model(DESIGN).posterior(runs)
    at_once = whole.draws(10, np.random.default_rng(0))(np.arange(len(LEVELS)))
    monkeypatch.setattr(model_module, "CHUNK", 5)
    split = Model(DESIGN).posterior(runs)
    draws_at = split.draws(10, np.random.default_rng(0))
    assert np.allclose(whole.mean, split.mean)
    assert np.allclose(at_once, np.concatenate([draws_at(cells) for cells in split.chunks()]))


def test_scales_follow_from_the_runs_alone_however_often_the_model_was_fitted() -> None:
    random = np.random.default_rng(5)
    runs = measured(truth(random), 15, random)
    often, once = Model(DESIGN), Model(DESIGN)
    for num in (20, 30, 45, 61, len(runs)):
        scales = often.posterior(runs.part(slice(0, num))).scales
    assert scales == once.posterior(runs).scales


def of_settings(predicted: Floats | None = None) -> Design:
    return Design.of([dict(zip("xyz", level, strict=True)) for level in LEVELS], predicted)


def test_a_right_prediction_tells_of_cells_that_never_ran_and_a_useless_one_does_no_harm() -> None:
    random = np.random.default_rng(6)
    mu = truth(random) + random.normal(0, 0.1, len(LEVELS))  # no sum of techniques and pairs
    runs = measured(mu, 20, random)
    seen = runs.part(runs.cell < 9)
    never = np.arange(9, len(LEVELS))

    def error(predicted: Floats | None) -> float:
        mean = Model(of_settings(predicted)).posterior(seen).mean
        difference = (mean - mu) - (mean - mu)[:9].mean()
        return float(np.sqrt((difference[never] ** 2).mean()))

    plain = error(None)
    assert error(mu + 3.0) < 0.6 * plain
    assert error(random.permutation(mu)) < 1.3 * plain


def test_scales_around_the_best_have_the_mean_and_the_covariance_of_a_gaussian() -> None:
    """Where the loss is quadratic, the rule is exact for both, and its points are equally probable."""
    random = np.random.default_rng(7)
    root = random.normal(size=(4, 4))
    precision = root @ root.T + 4 * np.eye(4)
    best = Scales()

    def loss(logs: Floats) -> float:
        return float(0.5 * (logs - best.logs) @ precision @ (logs - best.logs))

    found = _around(best, loss, least_curvature=1.0)
    points = np.array([scales.logs for scales in found.around])
    assert np.allclose(found.probabilities, 1.0)
    assert np.allclose(points.mean(axis=0), best.logs)
    assert np.allclose(np.cov(points.T, bias=True), np.linalg.inv(precision))


def test_few_runs_leave_the_scales_open_and_many_do_not() -> None:
    random = np.random.default_rng(8)
    runs = measured(truth(random), 60, random)
    model = Model(DESIGN)

    def spread(num: int) -> Floats:
        """Return the standard deviations of the logarithms of the four scales."""
        found = model._scales(runs.part(slice(0, num)))
        points = np.array([scales.logs for scales in found.around])
        shares = np.array(found.probabilities) / sum(found.probabilities)
        return np.sqrt(shares @ (points - shares @ points) ** 2)

    few, many = spread(24), spread(len(runs))
    assert few[3] > 2 * many[3], "the noise is known from many runs"
    assert many[3] == pytest.approx(1 / np.sqrt(2 * len(runs)), rel=0.5)


def test_draws_of_a_mixture_come_from_its_parts_by_their_probabilities() -> None:
    random = np.random.default_rng(9)
    runs = measured(truth(random), 8, random)
    cells = np.arange(len(LEVELS))
    parts = [Posterior(DESIGN, runs, Scales(residual=r)) for r in (0.001, 0.2)]
    mixture = Mixture(parts[0].scales, parts, [1.0, 3.0])
    draws = mixture.draws(20_000, random)(cells)
    assert draws.shape == (len(LEVELS), 20_000)
    assert np.abs(draws.mean(axis=1) - mixture.mean).max() < 0.01
    assert np.allclose(mixture.mean, 0.25 * parts[0].mean + 0.75 * parts[1].mean)
    within = [part.draws(20_000, random)(cells).var(axis=1) for part in parts]
    between = 0.25 * 0.75 * (parts[0].mean - parts[1].mean) ** 2
    exact = 0.25 * within[0] + 0.75 * within[1] + between
    assert np.allclose(draws.var(axis=1), exact, rtol=0.1)
